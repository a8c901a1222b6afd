"""Simulator plug-ins: each folder implements ``core.protocols.EnvPlugin`` as an entry point.

The modules here serve all of them. Read ``serving`` (the simulator's side of a process),
``processes`` (which replaces lost ones), ``vector_env``; then ``batched``, ``batch_serving`` and
``frame_memory`` for simulators that step a batch. What knows a single simulator belongs into its
folder.
"""

"""Simulator plug-ins: each folder implements ``core.protocols.EnvPlugin`` as an entry point.

The modules here serve all of them. Read ``serving`` (the simulator's side of a process),
``processes`` (which replaces lost ones), ``vector_env``; then ``batched`` and ``batch_serving`` for
simulators that step a batch. What knows a single simulator belongs into its folder.
"""

"""Franka Research 3 through franky (libfranka), real or simulated by franky-sim.

May enter: what is special to this arm. Read ``plugin``, ``client`` (in the policy's process), then
the arm's own process: ``process``, ``servo``, ``driver`` and ``gripper``. Only the last two and
``errors`` import franky.
"""

"""Plug-in for Meta-World. The entry point names ``plugin.plugin``.

Read ``config``, ``tasks``, ``plugin``; then what runs in the simulator's process: ``simulator``
(the slots and their conventions) on ``world`` (one of Meta-World's environments).
"""

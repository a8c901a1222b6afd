"""Robot arms, real and simulated, and operator devices: plug-ins.

What they offer is defined in ``features/realworld/robot.py``.

May enter: what moves, limits or simulates an arm; drivers are imported only where they are used.
Read ``franka``, then the limits: ``cell``, ``safety`` with ``admission``, ``smoothing``,
``state_monitor`` and ``command_gate``; then ``runtime_folder``, ``cameras`` and ``simulated``.
"""

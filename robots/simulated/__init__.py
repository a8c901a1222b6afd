"""Simulated cell: franky-sim serves franky on loopback, MuJoCo simulates an FR3 at a table.

May enter: what stands in for hardware, its faults included; nothing that drives an arm. Read
``client``, then the processes that it starts: ``cell`` with ``server``, ``arm`` and ``scene``, and
``renderer``, whose cameras observe the arm. ``touch`` is the task.
"""

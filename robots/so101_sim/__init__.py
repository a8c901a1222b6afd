"""Simulated SO-101: motors on a simulated Feetech bus, moved by MuJoCo, at a table with a cube.

May enter: what stands in for this arm's hardware. LeRobot's driver talks to a pseudo-terminal as to
the serial port of a real arm. Read ``client``, then the processes that it starts: ``cell`` with
``motors`` and ``scene``, and ``renderer``. ``reach`` is the task.
"""

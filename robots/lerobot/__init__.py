"""Robots that implement LeRobot's ``Robot`` interface, and a simulated SO-101.

May enter: what is special to LeRobot's drivers. Read ``plugin``, ``client`` (in the policy's
process), then the arm's own process: ``process``, ``servo`` and ``driver``. Only ``driver`` imports
lerobot, from the environment of ``robot.python``. ``so101_sim`` simulates the motors of an SO-101.
"""

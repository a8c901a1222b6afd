"""What a driver measures."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_vla.robot import ToolPose, Vector


@dataclass(frozen=True)
class Measured:
    """Fields as of ``RobotState``."""

    time: float
    pose: ToolPose
    joints: Vector
    joint_velocities: Vector
    wrench: Vector

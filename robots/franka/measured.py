"""Define the measurements that an arm driver returns."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_vla.core.robot import ToolPose, Vector


@dataclass(frozen=True)
class Measured:
    """Measured part of ``RobotState``, with the same fields."""

    time: float
    pose: ToolPose
    joints: Vector
    joint_velocities: Vector
    wrench: Vector

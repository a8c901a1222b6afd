"""Servo of a LeRobot robot, whose motors hold the positions that they got last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlinf_vla.features.realworld.robot import JointTarget, RobotState, Target

from ..joint_cell import JointCell
from ..joint_filter import JointFilter
from ..runtime_folder import Journal, Latch
from ..servo import ArmServo

if TYPE_CHECKING:
    from .driver import LeRobotArm

_STANDING = 1e-3
"""Share of ``max_speed`` below which a joint or its command stands still."""
_MOVING = 0.2
"""The same for measured speeds, which are differences of positions in steps of the encoder."""


class JointServo(ArmServo):
    """Servo of all joints of one robot."""

    def __init__(self, cell: JointCell, arm: LeRobotArm, latch: Latch, journal: Journal) -> None:
        self._speed = np.array(cell.max_speed)
        super().__init__(cell, arm, JointFilter(cell), latch, journal)

    def moves(self, state: RobotState) -> bool:
        return bool((np.abs(state.joint_velocities) > _MOVING * self._speed).any())

    def track(self, before: Target, command: Target) -> bool:
        assert isinstance(before, JointTarget) and isinstance(command, JointTarget)
        self.arm.track(command.positions)
        speed = np.abs(command.positions - before.positions) * self._cell.servo_hz
        return bool((speed > _STANDING * self._speed).any())

    def state(self) -> RobotState:
        measurement = self.arm.measured
        return RobotState(
            measurement.time, measurement.joints, measurement.joint_velocities, fault=self.fault
        )

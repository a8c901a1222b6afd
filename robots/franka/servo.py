"""Servo of a Franka with its hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlinf_vla.features.realworld.robot import RobotState, Target, ToolState, ToolTarget

from .. import kinematics
from ..cell import Cell
from ..runtime_folder import Journal, Latch
from ..safety import SafetyFilter
from ..servo import ArmServo
from ..state_monitor import STANDING_RAD_S

if TYPE_CHECKING:
    from .driver import FrankyArm
    from .gripper import FrankyGripper

_STANDING = 1e-4
"""Metres or radians per second below which a command counts as standing still."""


class Servo(ArmServo):
    """Servo of one arm and hand. Commands are tracked by impedance control."""

    def __init__(
        self, cell: Cell, arm: FrankyArm, gripper: FrankyGripper, latch: Latch, journal: Journal
    ) -> None:
        self.gripper = gripper
        super().__init__(cell, arm, SafetyFilter(cell), latch, journal)

    def stop_gripper(self) -> None:
        self.gripper.stop()

    @property
    def gripper_problem(self) -> str | None:
        return self.gripper.problem

    @property
    def busy(self) -> bool:
        return self.arm.controlled or self.gripper.halting

    def moves(self, state: RobotState) -> bool:
        return bool(np.abs(state.joint_velocities).max() > STANDING_RAD_S)

    def track(self, before: Target, command: Target) -> bool:
        assert isinstance(before, ToolTarget) and isinstance(command, ToolTarget)
        velocity = kinematics.velocity(before.pose, command.pose, self._cell.servo_hz)
        self.arm.track(command.pose, velocity)
        if command.gripper_width is not None and self.fault is None:
            self.gripper.pursue(command.gripper_width)
        return bool(np.abs(velocity).max() > _STANDING)

    def state(self) -> ToolState:
        measurement = self.arm.measured
        return ToolState(
            measurement.time,
            measurement.joints,
            measurement.joint_velocities,
            measurement.pose,
            measurement.wrench,
            self.gripper.width,
            fault=self.fault,
            pace=measurement.pace,
            holding=self.gripper.holding,
        )

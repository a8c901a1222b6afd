"""An arm and a hand that follow commands at once, and a Franka with them whose servo runs on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlinf_vla.features.realworld.robot import (
    Intervention,
    RobotError,
    RobotState,
    ToolPose,
    ToolTarget,
    Vector,
)
from rlinf_vla.robots import cell_file
from rlinf_vla.robots.cell import Cell
from rlinf_vla.robots.franka.messages import Measured
from rlinf_vla.robots.franka.servo import Servo
from rlinf_vla.robots.runtime_folder import Journal, Latch

if TYPE_CHECKING:
    from tests.features.realworld.virtual_time import VirtualClock

CELL = cell_file.load(cell_file.CELLS / "franka_sim.yaml", Cell)


class ObedientArm:
    def __init__(self) -> None:
        self.problem: str | None = None
        self.homing = False
        self.on_springs = False
        self.halted = 0
        self.stale_s = 0.0
        self.now = 0.0
        self.wrench: Vector = np.zeros(6)
        self.pace = 1.0
        self.pose = CELL.home
        self.joints: Vector = np.array(CELL.home_joints_rad)

    @property
    def measured(self) -> Measured:
        return Measured(
            self.now - self.stale_s, self.joints, np.zeros(7), self.pose, self.wrench, self.pace
        )

    def track(self, pose: ToolPose, velocity: Vector) -> None:
        self.pose = pose
        self.on_springs = True

    def home(self) -> None:
        self.homing = True

    def rest(self) -> None:
        self.on_springs = False

    def halt(self) -> None:
        self.halted += 1


class ObedientGripper:
    width = 0.08
    holding = False
    problem: str | None = None
    broken = False

    def pursue(self, width: float) -> None:
        if self.broken and abs(width - self.width) > 0.01:
            self.problem = "gripper: a command failed"
        self.width = width

    def stop(self) -> None: ...


def joints_of(arm: ObedientArm) -> Vector:
    found = CELL.arm.reach(arm.joints, arm.pose, 1e-5, 20)
    return arm.joints if found is None else found


class VirtualFranka:
    """Implements ``Robot``: all of the arm's process except its sockets and franky."""

    def __init__(self, clock: VirtualClock, folder: Path) -> None:
        self.spec = CELL.spec
        self._clock = clock
        self._folder = folder
        self.trajectory: list[tuple[float, float]] = []
        """(when, metres per second), at each tick."""
        self._interventions: list[Intervention] = []
        self.silent = False
        """The arm sends no more states."""
        self._journal: Journal | None = None
        self.connect(0.0)
        self._tick()

    def connect(self, timeout_s: float) -> None:
        self.arm = ObedientArm()
        self.gripper = ObedientGripper()
        self.close()
        self._journal = Journal(self._folder / "journal")
        self.servo = Servo(CELL, self.arm, self.gripper, Latch(self._folder), self._journal)

    def _tick(self) -> None:
        now = self._clock.now()
        before = self.arm.pose
        self.arm.now = self.arm.now if self.silent else now
        self._state, interventions = self.servo.tick(now)
        self._interventions += interventions
        if self.arm.homing:
            self.arm.homing = False
            self.arm.pose = CELL.home
            self.arm.joints = np.array(CELL.home_joints_rad)
        elif len(self.trajectory) % CELL.ticks_per_step == 0:
            self.arm.joints = joints_of(self.arm)
        self.trajectory.append(
            (now, CELL.servo_hz * float(np.linalg.norm(self.arm.pose.position - before.position)))
        )
        self._clock.at(now + 1 / CELL.servo_hz, self._tick)

    def observe(self) -> RobotState:
        self.servo.hear(self._clock.now())
        return self._state

    def command(self, target: ToolTarget, valid_until: float) -> None:
        if self._state.fault is not None:
            raise RobotError(self._state.fault)
        self.servo.pursue(target, valid_until, self._clock.now())

    def interventions(self) -> list[Intervention]:
        found = self._interventions
        self._interventions = []
        return found

    def stop(self, why: str) -> None:
        self.servo.stop(f"policy: {why}", self._clock.now())

    def acknowledge(self, operator: str) -> None:
        if self.arm.problem is None:
            self.servo.acknowledge(operator)

    def home(self, timeout_s: float, objection: Callable[[], str | None] = lambda: None) -> None:
        self.servo.home()
        self._clock.sleep_until(self._clock.now() + 0.1)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

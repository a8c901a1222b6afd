"""What the arm does at each tick of the servo: pursue the newest goal through the safety filter, or stand still, and say why.

Nothing here knows franky or a socket, and time is given: so it is tested on a virtual clock.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Protocol

import numpy as np

from rlinf_vla import rotations
from rlinf_vla.robot import Intervention, RobotError, RobotState, ToolPose, ToolTarget, Vector

from ..cell import Cell
from ..folder import Journal, Latch
from ..safety import SafetyFilter
from ..watch import STANDING_RAD_S
from .measured import Measured

NETWORK, POLICY = "network: ", "policy: "
"""Begin faults of the line to the arm, and of the policy's process."""

_RELIEF_S = 1.0
"""For which a homing that begins where the arm presses on something may go on pressing."""
_STANDING = 1e-4
"""Metres or radians per second of a command that stands."""


class Arm(Protocol):
    """See driver.FrankyArm."""

    @property
    def measured(self) -> Measured: ...

    @property
    def problem(self) -> str | None: ...

    @property
    def homing(self) -> bool: ...

    def track(self, pose: ToolPose, velocity: Vector) -> None: ...

    def home(self) -> None: ...

    def rest(self) -> None: ...

    def halt(self) -> None: ...


class Gripper(Protocol):
    """See gripper.FrankyGripper."""

    width: float
    problem: str | None

    def pursue(self, width: float) -> None: ...

    def stop(self) -> None: ...


class Servo:
    """A fault is latched: the arm decelerates within its limits, stands still, and refuses goals until ``acknowledge``."""

    def __init__(self, cell: Cell, arm: Arm, gripper: Gripper, latch: Latch, journal: Journal) -> None:
        self._cell, self._latch, self._journal = cell, latch, journal
        self.arm, self.gripper = arm, gripper
        self._filter = SafetyFilter(cell)
        found = latch.read()
        self.fault = found or arm.problem
        """What is latched."""
        self.took: list[float] = []
        """Seconds that the safety filter took in each tick, for whoever empties it."""
        self._goal: ToolTarget | None = None
        self._valid_until = -math.inf
        self._expired = 0
        self._armed = False
        """The policy moves the arm: silence of its process is a fault."""
        self._heard = -math.inf
        self._commanded: ToolTarget | None = None
        """What was last sent, while the arm is on its springs."""
        self._stepped = -math.inf
        """When."""
        self._still = 0
        """Ticks that the command has stood still."""
        self._halting = False
        """A homing is being broken off."""
        self._homed, self._freed = 0, True
        """Ticks on the way home, and whether the arm has felt no more than it may on it: it may begin where it presses."""
        if self.fault is not None:
            if found is None:
                latch.write(self.fault)
            journal.write("fault found at the start", fault=self.fault, durable=True)

    def hear(self, now: float) -> None:
        """Something came from the policy's process."""
        self._heard = now

    def pursue(self, goal: ToolTarget, valid_until: float, now: float) -> None:
        """Refused while a fault is latched, or the arm goes home."""
        if self.fault is not None or self.arm.homing:
            self._journal.write("goal refused", fault=self.fault or "homing")
            return
        late = self._armed and self._goal is None
        self._expired = self._expired + 1 if late else 0
        if self._expired >= self._cell.expired_goals_to_stop:
            self.stop(f"{POLICY}late, {self._expired} goals in a row came after the one before had expired", now)
            return
        self._goal, self._armed = goal, True
        self._valid_until = min(valid_until, now + self._cell.max_goal_validity_s)

    def stop(self, fault: str, now: float) -> None:
        """Latch ``fault``; the first that is latched keeps its name."""
        self.release()
        self.gripper.stop()
        if self.fault is None:
            self.fault = fault
            self._latch.write(fault)
            self._journal.write("fault", fault=fault, at=now, durable=True)

    def release(self) -> None:
        """Nobody moves the arm any more: it decelerates and stands, also on its way home; what the hand holds it goes on holding."""
        self._goal, self._armed, self._halting = None, False, True

    def acknowledge(self, person: str) -> None:
        """A person looked, and the cause is gone: the arm stands wherever it stands."""
        self._journal.write("acknowledged", fault=self.fault, person=person, durable=True)
        self._latch.clear()
        self._leave_springs()
        self.fault, self._expired = None, 0

    def home(self) -> None:
        if self.fault is None and not self.arm.homing:
            self._journal.write("homing")
            self._goal, self._armed = None, False
            self._leave_springs()
            self._halting, self._homed, self._freed = False, 0, False
            self.arm.home()

    @property
    def standing(self) -> bool:
        """The command stands still, or none is being sent, and the arm is not on its way home."""
        still = self._commanded is None or self._still > self._cell.servo_hz * self._cell.stop_time_s
        return still and not self.arm.homing

    def tick(self, now: float) -> tuple[RobotState, list[Intervention]]:
        """One step. ``now``: monotonic seconds. Returns the state after it, and what limits changed."""
        state = self._state()
        self._watch(now, state)
        if self._halting and self.arm.homing:  # in each tick: a motion that is only just being begun cannot be stopped yet
            self.arm.halt()
        interventions: list[Intervention] = []
        if self._goal is not None and now > self._valid_until:
            self._goal = None
        if self._goal is not None and self._commanded is None:
            self._take_springs(now, state)
        if self._commanded is not None:
            interventions = self._step(now, state, self._commanded)
        return replace(self._state(), commanded=self._commanded), interventions

    def _take_springs(self, now: float, state: RobotState) -> None:
        if np.abs(state.joint_velocities).max() > STANDING_RAD_S:
            return  # it will stand in a moment, or the goal expires
        try:
            self._filter.start(state)
        except RobotError as error:
            self.stop(str(error), now)
        else:
            self._commanded, self._stepped, self._still = self._filter.admitted, now - 1 / self._cell.servo_hz, 0

    def _step(self, now: float, state: RobotState, before: ToolTarget) -> list[Intervention]:
        if self.arm.problem is not None:  # it has left its springs by itself
            self._commanded = None
            return []
        passed, self._stepped = now - self._stepped, now
        begun = time.perf_counter()
        command, interventions, fault = self._filter.step(self._goal, state, passed)
        self.took.append(time.perf_counter() - begun)
        if fault is not None:
            self.stop(fault, now)
        velocity = _velocity(before.pose, command.pose, self._cell.servo_hz)
        self._still = 0 if np.abs(velocity).max() > _STANDING else self._still + 1
        self.arm.track(command.pose, velocity)
        if command.gripper_width is not None and self.fault is None:
            self.gripper.pursue(command.gripper_width)
        self._commanded = command
        if self._goal is None and self.standing:
            self._leave_springs()  # the arm's own controller holds better than springs, which swing
        return interventions

    def _leave_springs(self) -> None:
        if self._commanded is not None:
            self._commanded = None
            self.arm.rest()

    def _watch(self, now: float, state: RobotState) -> None:
        """What makes the arm stop."""
        age = now - state.time
        if self.arm.problem is not None:
            self.stop(self.arm.problem, now)
        elif age > self._cell.max_state_age_s:
            self.stop(f"{NETWORK}no state of the arm for {age:.2f} s", now)
        elif self.gripper.problem is not None:
            self.stop(self.gripper.problem, now)
        elif (self._armed or self.arm.homing) and now - self._heard > self._cell.heartbeat_timeout_s:
            self.stop(f"{POLICY}its process has said nothing for {now - self._heard:.2f} s", now)
        elif self.arm.homing and (felt := self._felt(state)) is not None:
            self.stop(felt, now)

    def _felt(self, state: RobotState) -> str | None:
        """What the arm must not feel on its way home."""
        felt = self._filter.felt(state)
        self._homed, self._freed = self._homed + 1, self._freed or felt is None
        return felt if self._freed or self._homed > _RELIEF_S * self._cell.servo_hz else None

    def _state(self) -> RobotState:
        found = self.arm.measured
        return RobotState(found.time, found.pose, found.joints, found.joint_velocities, found.wrench, self.gripper.width, fault=self.fault)


def _velocity(before: ToolPose, after: ToolPose, hz: float) -> Vector:
    """Of the tool between two ticks, metres and radians per second ``[6]``, in the base's axes."""
    turn = rotations.multiply(after.quaternion.tolist(), rotations.inverse(before.quaternion.tolist()))
    return hz * np.array([*(after.position - before.position), *rotations.to_vector(turn)])

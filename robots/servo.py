"""Servo loop of an arm: pursue the newest goal through a safety filter, latch faults.

It does not depend on drivers or sockets, and time is an argument, so tests use a virtual clock.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Protocol

from rlinf_vla.features.realworld.robot import (
    POLICY,
    Intervention,
    RobotError,
    RobotState,
    Target,
    stopped_by_a_person,
)

from .arm_cell import ArmCell
from .runtime_folder import Journal, Latch

NETWORK = "network: "
"""Prefix of faults of the connection to the arm."""

_RELIEF_S = 1.0
"""How long homing tolerates the contact force that it starts with."""


class ArmDriver(Protocol):
    """What drives the arm itself. No method blocks."""

    problem: str | None
    """What prevents motion, or None."""
    homing: bool

    def home(self) -> None:
        """Start moving to the rest position; ``homing`` is True until the arm is there."""

    def halt(self) -> None:
        """Abort homing. Called until ``homing`` is False."""

    def rest(self) -> None:
        """End the tracking of commands; the arm holds its place."""

    @property
    def controlled(self) -> bool:
        """Whether a motion is running, which must end before the connection does."""


class ArmServo(ABC):
    """Servo of one arm; a subclass knows its states, its safety filter, and what tracks commands.

    On a fault the arm decelerates within its limits, stands still and refuses goals until
    ``acknowledge``.
    """

    def __init__(
        self, cell: ArmCell, arm: Any, safety_filter: Any, latch: Latch, journal: Journal
    ) -> None:
        """``arm``: an ArmDriver. ``safety_filter``: with the methods of SafetyFilter."""
        self._cell = cell
        self._latch = latch
        self._journal = journal
        self.arm = arm
        self._filter = safety_filter
        self.recovering = False
        """The latched fault is acknowledged, and the arm is recovering from it."""
        self.took: list[float] = []
        """Seconds per step of the safety filter; the caller empties it."""
        self._goal: Target | None = None
        self._valid_until = -math.inf
        self._expired = 0
        self._armed = False
        """The policy moves the arm, so silence of its process is a fault."""
        self._heard = -math.inf
        self._commanded: Target | None = None
        """The last command, while impedance control is on."""
        self._stepped = -math.inf
        """Time of the last command."""
        self._still = 0
        """Ticks for which the command has stood still."""
        self._halting = False
        """Homing is being aborted."""
        self._homed = 0
        self._freed = True
        """Ticks of homing; whether the force was within limits yet: homing may start in contact."""
        if arm.problem is not None and self.fault is None:
            latch.add(arm.problem)
        if self.fault is not None:
            journal.write("fault found at the start", fault=self.fault, durable=True)

    @property
    def fault(self) -> str | None:
        """The oldest latched fault."""
        return self._latch.fault

    def hear(self, now: float) -> None:
        """Record a message from the policy's process."""
        self._heard = now

    def pursue(self, goal: Target, valid_until: float, now: float) -> None:
        """Set the goal; refused while a fault is latched or the arm is homing.

        A time that is not finite is a fault: it would never expire.
        """
        if self.fault is not None or self.arm.homing:
            self._journal.write("goal refused", fault=self.fault or "homing")
            return
        if not math.isfinite(valid_until):
            self.stop(f"{POLICY}a goal that is valid until {valid_until} s", now)
            return
        late = self._armed and self._goal is None
        self._expired = self._expired + 1 if late else 0
        if self._expired >= self._cell.expired_goals_to_stop:
            self._stop_in_time(
                f"{POLICY}late, {self._expired} goals in a row arrived after the previous one had expired",
                now,
            )
            return
        self._goal = goal
        self._armed = True
        self._valid_until = min(valid_until, now + self._cell.max_goal_validity_s)

    def stop(self, fault: str, now: float, own: bool = False) -> None:
        """Stop the arm and latch ``fault``, unless a fault is already latched.

        A person's stop, and with ``own`` any other, is latched after earlier faults and has to be
        acknowledged on its own.
        """
        self.release()
        self.stop_gripper()
        own = own or stopped_by_a_person(fault)
        if (own or self.fault is None) and self._latch.add(fault, self.recovering):
            self._journal.write("fault", fault=self._latch.faults[-1], at=now, durable=True)

    def _stop_in_time(self, fault: str, now: float) -> None:
        """Stop because of a fault that a slow simulation can cause; say so."""
        slow = self.state().slow
        self.stop(fault if slow is None else f"{fault} ({slow})", now)

    def release(self) -> None:
        """Drop the goal: the arm decelerates to a stop, also during homing; a grasp is kept."""
        self._goal = None
        self._armed = False
        self._halting = True

    def acknowledge(self, operator: str) -> None:
        """Clear the oldest fault: an operator has inspected the arm and the cause is removed."""
        self._journal.write("acknowledged", fault=self.fault, operator=operator, durable=True)
        self._latch.release()
        self._leave_springs()
        self._expired = 0

    def home(self) -> None:
        """Start homing, unless a fault is latched or the arm is homing already."""
        if self.fault is None and not self.arm.homing:
            self._journal.write("homing")
            self._goal = None
            self._armed = False
            self._leave_springs()
            self._halting = False
            self._homed = 0
            self._freed = False
            self.arm.home()

    @abstractmethod
    def state(self) -> RobotState:
        """Return the newest measured state, with the oldest fault."""

    @abstractmethod
    def track(self, before: Target, command: Target) -> bool:
        """Send the command of this tick; return whether it differs from the one ``before``."""

    @abstractmethod
    def moves(self, state: RobotState) -> bool:
        """Return whether the arm moves, so that tracking must not start yet."""

    def stop_gripper(self) -> None:
        """Stop what the arm's gripper does by itself."""
        return None

    @property
    def gripper_problem(self) -> str | None:
        return None

    @property
    def busy(self) -> bool:
        """Whether a motion is running that must end before the arm is left."""
        return bool(self.arm.controlled)

    @property
    def standing(self) -> bool:
        """Whether the arm is not homing and the command stands still, or none is being sent."""
        still = (
            self._commanded is None or self._still > self._cell.servo_hz * self._cell.stop_time_s
        )
        return still and not self.arm.homing

    def tick(self, now: float) -> tuple[RobotState, list[Intervention]]:
        """Run one step at ``now`` (monotonic s); return the new state and the interventions."""
        state = self.state()
        self._watch(now, state)
        if (
            self._halting and self.arm.homing
        ):  # at each tick: a motion that is starting cannot be stopped yet
            self.arm.halt()
        interventions: list[Intervention] = []
        if self._goal is not None and now > self._valid_until:
            self._goal = None
        if self._goal is not None and self._commanded is None:
            self._take_springs(now, state)
        if self._commanded is not None:
            interventions = self._step(now, state, self._commanded)
        return replace(self.state(), commanded=self._commanded), interventions

    def _take_springs(self, now: float, state: RobotState) -> None:
        if self.moves(state):
            return  # wait until the arm stands, or the goal expires
        try:
            self._filter.start(state)
        except RobotError as error:
            self.stop(str(error), now)
        else:
            self._commanded = self._filter.admitted
            self._stepped = now - 1 / self._cell.servo_hz
            self._still = 0

    def _step(self, now: float, state: RobotState, before: Target) -> list[Intervention]:
        if self.arm.problem is not None:  # the arm has ended impedance control by itself
            self._commanded = None
            return []
        passed = now - self._stepped
        self._stepped = now
        begun = time.perf_counter()
        command, interventions, fault = self._filter.step(self._goal, state, passed)
        self.took.append(time.perf_counter() - begun)
        if fault is not None:
            self._stop_in_time(fault, now)
        self._still = 0 if self.track(before, command) else self._still + 1
        self._commanded = command
        if self._goal is None and self.standing:
            self._leave_springs()  # the arm's own controller holds better than impedance control, which oscillates
        return interventions

    def _leave_springs(self) -> None:
        if self._commanded is not None:
            self._commanded = None
            self.arm.rest()

    def _watch(self, now: float, state: RobotState) -> None:
        """Stop the arm if it, its connection, the gripper or the policy's process has a fault."""
        age = now - state.time
        if self.arm.problem is not None:
            self.stop(self.arm.problem, now)
        elif age > self._cell.max_state_age_s:
            self._stop_in_time(f"{NETWORK}no state of the arm for {age:.2f} s", now)
        elif (problem := self.gripper_problem) is not None:
            self.stop(problem, now)
        elif (
            self._armed or self.arm.homing
        ) and now - self._heard > self._cell.heartbeat_timeout_s:
            self._stop_in_time(
                f"{POLICY}its process has said nothing for {now - self._heard:.2f} s", now
            )
        elif self.arm.homing and (felt := self._felt(state)) is not None:
            self._stop_in_time(felt, now)

    def _felt(self, state: RobotState) -> str | None:
        """Return the force or torque fault during homing, or None."""
        felt = self._filter.felt(state)
        self._homed = self._homed + 1
        self._freed = self._freed or felt is None
        return felt if self._freed or self._homed > _RELIEF_S * self._cell.servo_hz else None

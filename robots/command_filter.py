"""What the safety filters of all arms do in a tick of the servo, whatever moves the arm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, Generic, NamedTuple, TypeVar

from rlinf_vla.features.realworld.robot import Intervention, RobotState, Target

from .arm_cell import ArmCell

Goal = TypeVar("Goal", bound=Target)
State = TypeVar("State", bound=RobotState)

EARLIEST, LATEST = 0.5, 2.0
"""Bounds of a tick's duration, in servo periods.

An earlier tick repeats the last command. After a later one the arm is assumed to have stood still.
"""


class Filtered(NamedTuple, Generic[Goal]):
    """Result of one step."""

    command: Goal
    interventions: list[Intervention]
    fault: str | None
    """The violated limit, for the caller to latch. The command already decelerates and holds."""


class CommandFilter(ABC, Generic[Goal, State]):
    """Keep the commands of one arm within the limits of its cell.

    A subclass knows what a goal is, how one is admitted, and what a command must obey.
    """

    def __init__(self, cell: ArmCell) -> None:
        self.counts: Counter[str] = Counter()
        """Interventions so far, by rule."""
        self._servo_hz = cell.servo_hz
        self._tick_s = 1 / cell.servo_hz
        self._ticks = cell.ticks_per_step
        self._reference: Any = None
        self._end: Any = None
        self._commanded: Any = None
        self._left = 0
        """Ticks until the reference reaches the end of its path."""
        self._goal: Goal | None = None
        self._command: Goal | None = None
        self._gate_fault: str | None = None
        self._told: list[Intervention] = []

    def step(self, goal: Goal | None, state: State, dt: float) -> Filtered[Goal]:
        """Return the command of this tick, ``dt`` seconds after the last.

        A goal is new if it is a different object than at the last tick. None: decelerate and hold.
        Raises RuntimeError before ``start``.
        """
        if self._command is None:
            raise RuntimeError(f"{type(self).__name__}.step before start")
        self._told = []
        fault = self._gate_fault or self._fault(state)
        if not EARLIEST * self._tick_s <= dt <= LATEST * self._tick_s:
            self._tell(state, "servo_hz", 1 / dt if dt > 1e-9 else 1e9, self._servo_hz)
            if not dt > LATEST * self._tick_s:
                return Filtered(self._command, self._told, fault)
            self._rest(self._commanded, state)
        if goal is None or fault is not None:
            self._hold()
        elif goal is not self._goal:
            self._goal = goal
            self._admit(goal, state)
        command = self._travel()
        if self._gate_fault is None:
            self._gate_fault = self._check(command)
        if self._gate_fault is None:
            self._command = command
        return Filtered(self._command, self._told, fault or self._gate_fault)

    def _hold(self) -> None:
        self._end = self._reference
        self._left = 0
        self._goal = None

    def _tell(self, state: State, rule: str, before: float, after: float) -> None:
        self._told.append(Intervention(state.time, rule, float(before), float(after)))
        self.counts[rule] += 1

    @abstractmethod
    def _fault(self, state: State) -> str | None:
        """Return the limit that a measurement exceeds, or None."""

    @abstractmethod
    def _rest(self, at: Any, state: State) -> None:
        """Set reference, command and gate to standstill at this place."""

    @abstractmethod
    def _admit(self, goal: Goal, state: State) -> None:
        """Set the end of the reference's path, and tell what limits changed."""

    @abstractmethod
    def _travel(self) -> Goal:
        """Move the reference by one tick and return the smoothed command."""

    @abstractmethod
    def _check(self, command: Goal) -> str | None:
        """Return the limit that a command violates, or None; record it as sent if none."""

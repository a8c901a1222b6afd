"""Safety filter of an arm that is moved by its joints: turn goals into commands within every limit.

It works as ``safety.py`` does for a tool: a goal is admitted once, a reference point travels there
in a straight line in one control period, and the command is a smooth average of past references,
which bounds speed, acceleration and jerk of each joint (``smoothing.py``). A gate checks each
command again by finite differences.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from rlinf_vla.core.robot import Intervention, JointTarget, RobotError, RobotState, Vector

from .joint_cell import JointCell
from .safety import EARLIEST, LATEST
from .smoothing import Average

SAG = 0.02
"""Share of its range by which a resting joint may stand beyond a limit; it then starts there."""
_RELATIVE, _ABSOLUTE = 1e-6, 1e-6
"""Tolerances for float rounding: a third difference divides the error by the tick cubed."""


class Filtered(NamedTuple):
    """Result of one step."""

    command: JointTarget
    interventions: list[Intervention]
    fault: str | None
    """The violated limit, for the caller to latch. The command already decelerates and holds."""


class JointFilter:
    """Keep the commands of one arm within the limits of its cell."""

    def __init__(self, cell: JointCell) -> None:
        self.counts: Counter[str] = Counter()
        """Interventions so far, by rule."""
        self._cell, self._gate, self._average = cell, JointGate(cell), Average(cell.windows)
        self._lower, self._upper = np.array(cell.lower), np.array(cell.upper)
        self._step, self._lead = np.array(cell.max_speed) / cell.control_hz, np.array(cell.max_lead)
        self._deviation = np.where(cell.is_gripper, np.inf, np.array(cell.max_deviation))
        self._tick_s, self._ticks = 1 / cell.servo_hz, cell.ticks_per_step
        self._reference = self._end = self._commanded = np.zeros(len(cell.joints))
        self._left = 0
        """Ticks until the reference reaches the end of its path."""
        self._goal: JointTarget | None = None
        self._command: JointTarget | None = None
        self._away = 0
        """Ticks for which a joint has been too far from its command."""
        self._gate_fault: str | None = None
        self._told: list[Intervention] = []

    @property
    def admitted(self) -> JointTarget:
        """The target of the current motion: the last goal after all limits."""
        return JointTarget(self._end.copy())

    def start(self, state: RobotState) -> None:
        """Start at rest at the measured joints. Raises RobotError where the arm must not start."""
        wrong = self._unmeasured(state) or self._outside(state)
        if wrong is not None:
            raise RobotError(wrong)
        self._gate_fault, self._away = None, 0
        self._rest(np.clip(state.joints, self._lower, self._upper))

    def felt(self, state: RobotState) -> str | None:
        """Return what is wrong with a measurement, or None; also valid while not commanding."""
        return self._unmeasured(state)

    def step(self, goal: JointTarget | None, state: RobotState, dt: float) -> Filtered:
        """Return the command of this tick, ``dt`` seconds after the last.

        A goal is new if it is a different object than at the last tick. None: decelerate and hold.
        Raises RuntimeError before ``start``.
        """
        if self._command is None:
            raise RuntimeError("JointFilter.step before start")
        self._told = []
        fault = self._gate_fault or self._unmeasured(state) or self._blocked(state)
        if not EARLIEST * self._tick_s <= dt <= LATEST * self._tick_s:
            self._tell(state, "servo_hz", 1 / dt if dt > 1e-9 else 1e9, self._cell.servo_hz)
            if not dt > LATEST * self._tick_s:
                return Filtered(self._command, self._told, fault)
            self._rest(self._commanded)
        if goal is None or fault is not None:
            self._hold()
        elif goal is not self._goal:
            self._goal = goal
            self._admit(goal, state)
        command = self._travel()
        if self._gate_fault is None:
            self._gate_fault = self._gate.check(command)
        if self._gate_fault is None:
            self._command = JointTarget(command)
        return Filtered(self._command, self._told, fault or self._gate_fault)

    def _unmeasured(self, state: RobotState) -> str | None:
        if state.joints.shape != self._lower.shape or not np.isfinite(state.joints).all():
            return "state: a measurement is not finite, or joints are missing"
        return None

    def _outside(self, state: RobotState) -> str | None:
        sag = SAG * (self._upper - self._lower)
        for name, at, low, high in zip(self._cell.joints, state.joints, self._lower - sag, self._upper + sag, strict=True):
            if not low <= at <= high:
                return f"lower, upper: {name} stands at {at:.1f}, outside [{low:.1f}, {high:.1f}]; bring the arm home"
        return None

    def _blocked(self, state: RobotState) -> str | None:
        apart = np.abs(state.joints - self._commanded)
        self._away = self._away + 1 if (apart > self._deviation).any() else 0
        if self._away * self._tick_s <= self._cell.max_deviation_s:
            return None
        joint = int((apart - self._deviation).argmax())
        return f"max_deviation: {self._cell.joints[joint]} is {apart[joint]:.1f} from its command; is it blocked?"

    def _rest(self, at: Vector) -> None:
        self._reference = self._end = self._commanded = at
        self._hold()
        self._average.rest(at)
        self._command = JointTarget(at)
        self._gate.rest(at)

    def _hold(self) -> None:
        self._end, self._left, self._goal = self._reference, 0, None

    def _tell(self, state: RobotState, rule: str, before: float, after: float) -> None:
        self._told.append(Intervention(state.time, rule, float(before), float(after)))
        self.counts[rule] += 1

    def _admit(self, goal: JointTarget, state: RobotState) -> None:
        wanted = np.asarray(goal.positions, np.float64)
        if wanted.shape != self._reference.shape:
            self._tell(state, "shape", wanted.size, self._reference.size)
            return self._hold()
        if not np.isfinite(wanted).all():
            self._tell(state, "not_finite", float(np.count_nonzero(~np.isfinite(wanted))), 0)
            return self._hold()
        at = np.clip(state.joints, self._lower, self._upper)  # an arm that sags beyond a limit leads back in
        for key, low, high in (
            ("lower", self._lower, np.full_like(wanted, np.inf)),
            ("upper", np.full_like(wanted, -np.inf), self._upper),
            ("max_speed", self._reference - self._step, self._reference + self._step),
            ("max_lead", np.minimum(self._reference, at - self._lead), np.maximum(self._reference, at + self._lead)),
        ):
            cut = np.clip(wanted, low, high)
            for joint in np.flatnonzero(np.abs(cut - wanted) > _ABSOLUTE):
                self._tell(state, f"{key} {self._cell.joints[joint]}", wanted[joint], cut[joint])
            wanted = cut
        self._end, self._left = wanted, self._ticks

    def _travel(self) -> Vector:
        """Move the reference by one tick and return the smoothed command."""
        if self._left:
            self._reference = self._reference + (self._end - self._reference) / self._left
            self._left -= 1
        self._commanded = self._average.push(self._reference)
        return self._commanded


class JointGate:
    """Check commands by finite differences, from the limits and earlier commands alone."""

    def __init__(self, cell: JointCell) -> None:
        self._names, self._tick_s = cell.joints, 1 / cell.servo_hz
        self._lower, self._upper = np.array(cell.lower), np.array(cell.upper)
        self._limits = [(key, np.array(getattr(cell, key))) for key in ("max_speed", "max_acceleration", "max_jerk")]
        self._before: list[Vector] = []

    def rest(self, at: Vector) -> None:
        """Restart the checks from standstill."""
        self._before = [at, np.zeros_like(at), np.zeros_like(at)]

    def check(self, command: Vector) -> str | None:
        """Return the limit that ``command``, one tick after the last, violates, or None.

        A command that passes is recorded as sent; one that is refused is ignored.
        """
        if not np.isfinite(command).all():
            return "the command is not finite"
        outside = np.maximum(self._lower - command, command - self._upper)
        if (outside > _ABSOLUTE).any():
            return f"lower, upper: a command of {self._names[int(outside.argmax())]} violates the limit"
        found = [command]
        for (key, limit), before in zip(self._limits, self._before, strict=True):
            found.append((found[-1] - before) / self._tick_s)
            over = np.abs(found[-1]) - limit * (1 + _RELATIVE) - _ABSOLUTE / self._tick_s ** (len(found) - 1)
            if (over > 0).any():
                joint = int(over.argmax())
                return f"{key}: a command of {self._names[joint]} has {abs(found[-1][joint]):.6g}"
        self._before = found[:3]
        return None

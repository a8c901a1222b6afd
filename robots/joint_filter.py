"""Safety filter of an arm that is moved by its joints: turn goals into commands within every limit.

It works as ``safety.py`` does for a tool: a goal is admitted once, a reference point travels there
in a straight line in one control period, and the command is a smooth average of past references,
which bounds speed, acceleration and jerk of each joint (``smoothing.py``). A gate checks each
command again by finite differences.
"""

from __future__ import annotations

import numpy as np

from rlinf_vla.features.realworld.robot import JointTarget, RobotError, RobotState, Vector

from .command_filter import CommandFilter
from .joint_cell import JointCell
from .smoothing import Average

SAG = 0.02
"""Share of its range by which a resting joint may stand beyond a limit; it then starts there."""
_RELATIVE, _ABSOLUTE = 1e-6, 1e-6
"""Tolerances for float rounding: a third difference divides the error by the tick cubed."""


class JointFilter(CommandFilter[JointTarget, RobotState]):
    """Keep the commands of one arm within the limits of its cell."""

    def __init__(self, cell: JointCell) -> None:
        super().__init__(cell)
        self._cell = cell
        self._gate = JointGate(cell)
        self._average = Average(cell.windows)
        self._lower = np.array(cell.lower)
        self._upper = np.array(cell.upper)
        self._step = np.array(cell.max_speed) / cell.control_hz
        self._lead = np.array(cell.max_lead)
        self._deviation = np.where(cell.is_gripper, np.inf, np.array(cell.max_deviation))
        self._reference = self._end = self._commanded = np.zeros(len(cell.joints))
        self._away = 0
        """Ticks for which a joint has been too far from its command."""

    @property
    def admitted(self) -> JointTarget:
        """The target of the current motion: the last goal after all limits."""
        return JointTarget(self._end.copy())

    def start(self, state: RobotState) -> None:
        """Start at rest at the measured joints. Raises RobotError where the arm must not start."""
        wrong = self._unmeasured(state) or self._outside(state)
        if wrong is not None:
            raise RobotError(wrong)
        self._gate_fault = None
        self._away = 0
        self._rest(np.clip(state.joints, self._lower, self._upper), state)

    def felt(self, state: RobotState) -> str | None:
        """Return what is wrong with a measurement, or None; also valid while not commanding."""
        return self._unmeasured(state)

    def _unmeasured(self, state: RobotState) -> str | None:
        if state.joints.shape != self._lower.shape or not np.isfinite(state.joints).all():
            return "state: a measurement is not finite, or joints are missing"
        return None

    def _outside(self, state: RobotState) -> str | None:
        sag = SAG * (self._upper - self._lower)
        for name, at, low, high in zip(
            self._cell.joints, state.joints, self._lower - sag, self._upper + sag, strict=True
        ):
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

    def _fault(self, state: RobotState) -> str | None:
        return self._unmeasured(state) or self._blocked(state)

    def _check(self, command: JointTarget) -> str | None:
        return self._gate.check(command.positions)

    def _rest(self, at: Vector, state: RobotState) -> None:
        self._reference = self._end = self._commanded = at
        self._hold()
        self._average.rest(at)
        self._command = JointTarget(at)
        self._gate.rest(at)

    def _admit(self, goal: JointTarget, state: RobotState) -> None:
        target = np.asarray(goal.positions, np.float64)
        if target.shape != self._reference.shape:
            self._tell(state, "shape", target.size, self._reference.size)
            return self._hold()
        if not np.isfinite(target).all():
            self._tell(state, "not_finite", float(np.count_nonzero(~np.isfinite(target))), 0)
            return self._hold()
        at = np.clip(
            state.joints, self._lower, self._upper
        )  # an arm that sags beyond a limit leads back in
        for key, low, high in (
            ("lower", self._lower, np.full_like(target, np.inf)),
            ("upper", np.full_like(target, -np.inf), self._upper),
            ("max_speed", self._reference - self._step, self._reference + self._step),
            (
                "max_lead",
                np.minimum(self._reference, at - self._lead),
                np.maximum(self._reference, at + self._lead),
            ),
        ):
            cut = np.clip(target, low, high)
            for joint in np.flatnonzero(np.abs(cut - target) > _ABSOLUTE):
                self._tell(state, f"{key} {self._cell.joints[joint]}", target[joint], cut[joint])
            target = cut
        self._end = target
        self._left = self._ticks

    def _travel(self) -> JointTarget:
        if self._left:
            self._reference = self._reference + (self._end - self._reference) / self._left
            self._left -= 1
        self._commanded = self._average.push(self._reference)
        return JointTarget(self._commanded)


class JointGate:
    """Check commands by finite differences, from the limits and earlier commands alone."""

    def __init__(self, cell: JointCell) -> None:
        self._names = cell.joints
        self._tick_s = 1 / cell.servo_hz
        self._lower = np.array(cell.lower)
        self._upper = np.array(cell.upper)
        self._limits = [
            (key, np.array(getattr(cell, key)))
            for key in ("max_speed", "max_acceleration", "max_jerk")
        ]
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
        derivatives = [command]
        for (key, limit), before in zip(self._limits, self._before, strict=True):
            derivatives.append((derivatives[-1] - before) / self._tick_s)
            over = (
                np.abs(derivatives[-1])
                - limit * (1 + _RELATIVE)
                - _ABSOLUTE / self._tick_s ** (len(derivatives) - 1)
            )
            if (over > 0).any():
                joint = int(over.argmax())
                return f"{key}: a command of {self._names[joint]} has {abs(derivatives[-1][joint]):.6g}"
        self._before = derivatives[:3]
        return None

"""The last thing before the arm: goals of anyone become commands within every limit of the cell.

Each servo tick ``SafetyFilter.step`` makes one command. A goal is admitted once, when it comes: refused where it is malformed, moved into
the workspace and the cone, cut short where it is further than one step, what is left of the second, contact or joints allow
(``admission.py``). Then a reference point travels there in one control period, along a straight line; the command is a smooth average of
where the reference was, which bounds speed, acceleration and jerk, and which stops within all of them whenever the reference stops
(``smoothing.py``). What comes out is looked at once more by something that knows nothing of all this (``gate.py``).

Limits of speed, acceleration and jerk shape every motion; that is no intervention. What changes where a goal ends is one, told once for
each goal and rule. The filter is idempotent: ``admitted``, given as a new goal in the state in which the goal came, makes the same command
without intervention (to 1e-9).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import numpy as np

from rlinf_vla.robot import Intervention, RobotError, RobotState, ToolTarget, Vector

from .admission import Admission, Start
from .cell import Cell
from .gate import Gate
from .smoothing import Average
from .space import Place, Space, along
from .watch import Watch

EARLIEST, LATEST = 0.5, 2.0
"""Of a servo period. A tick before the first repeats the last command; after the second the arm is taken to have stood since."""


class Filtered(NamedTuple):
    command: ToolTarget
    interventions: list[Intervention]
    fault: str | None
    """The limit that was passed, to be latched by the caller. The command then already decelerates and holds."""


class SafetyFilter:
    def __init__(self, cell: Cell) -> None:
        self.counts: Counter[str] = Counter()
        """Interventions so far, by rule."""
        self._cell, self._space, self._gate, self._arm = cell, Space(cell), Gate(cell), cell.arm
        self._watch = Watch(cell, self._space)
        self._tick_s, self._ticks = 1 / cell.servo_hz, cell.ticks_per_step
        self._average = Average(cell.windows)
        self._ways = np.zeros((round(cell.servo_hz), 2))
        """Metres and radians that the reference went in each tick of the last second."""
        self._tick = 0
        self._reference: Place = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
        self._end = self._commanded = self._reference
        self._joints = self._end_joints = np.zeros(7)
        self._left = 0
        """Ticks until the reference is at the end of its way."""
        self._goal: ToolTarget | None = None
        self._width: float | None = None
        self._command: ToolTarget | None = None
        self._gate_fault: str | None = None
        self._told: list[Intervention] = []

    @property
    def admitted(self) -> ToolTarget:
        """Where the command is on its way to: what was left of the last goal."""
        return ToolTarget(self._space.pose((*self._end[0], *self._end[1])), self._width)

    def start(self, state: RobotState) -> None:
        """Begin at rest where the arm stands; again after every fault. Raises RobotError where it must not begin there."""
        wrong = self._watch.misplaced(state)
        if wrong is not None:
            raise RobotError(wrong)
        place, _ = self._space.inside(self._space.place(state.pose, (0.0, 0.0, 0.0)))
        self._width, self._gate_fault = None, None
        self._rest(np.array((*place[0], *place[1])), state)

    def felt(self, state: RobotState) -> str | None:
        """What stops the arm also where no command of this filter moves it: a force or a torque, or None."""
        return self._watch.felt(state)

    def step(self, goal: ToolTarget | None, state: RobotState, dt: float) -> Filtered:
        """The command of this tick, ``dt`` seconds after the last. ``goal`` None: decelerate and hold.

        A goal is new where it is another object than at the last tick. Raises RuntimeError before ``start``.
        """
        if self._command is None:
            raise RuntimeError("SafetyFilter.step before start")
        self._told = []
        fault = self._gate_fault or self._watch.fault(state)
        if not EARLIEST * self._tick_s <= dt <= LATEST * self._tick_s:
            self._tell(state, "servo_hz", 1 / dt if dt > 1e-9 else 1e9, self._cell.servo_hz)
            if not dt > LATEST * self._tick_s:
                return Filtered(self._command, self._told, fault)
            self._rest(np.array((*self._commanded[0], *self._commanded[1])), state)
        if goal is None or fault is not None:
            self._hold()
        elif goal is not self._goal:
            self._goal = goal
            self._admit(goal, state)
        command = self._travel()
        if self._gate_fault is None:
            self._gate_fault = self._gate.check(command)
        if self._gate_fault is None:
            self._command = command
        return Filtered(self._command, self._told, fault or self._gate_fault)

    def _rest(self, at: Vector, state: RobotState) -> None:
        """Begin at rest, ``at`` six numbers."""
        self._joints = state.joints.copy()
        x, y, z, *turn = at.tolist()
        self._reference = self._end = self._commanded = ((x, y, z), (turn[0], turn[1], turn[2]))
        self._hold()
        self._average.rest(at)
        self._command = ToolTarget(self._space.pose(at.tolist()), self._width)
        self._gate.rest(self._command)

    def _hold(self) -> None:
        self._end, self._left, self._goal = self._reference, 0, None

    def _tell(self, state: RobotState, rule: str, before: float, after: float) -> None:
        self._told.append(Intervention(state.time, rule, float(before), float(after)))
        self.counts[rule] += 1

    def _admit(self, goal: ToolTarget, state: RobotState) -> None:
        gone_m, gone_rad = self._ways.sum(axis=0).tolist()
        admission = Admission(self._cell, self._space, self._arm, goal, Start(self._reference, self._joints, gone_m, gone_rad), state)
        self._end, self._end_joints, self._left = admission.end, admission.joints, self._ticks
        self._width = self._width if admission.width is None else admission.width
        for rule, (before, after) in admission.changes.items():
            self._tell(state, rule, before, after)

    def _travel(self) -> ToolTarget:
        """One tick on."""
        before = self._reference
        if self._left == 1:
            self._reference, self._joints = self._end, self._end_joints
        elif self._left:
            part = 1 / self._left
            self._reference = along(before[0], self._end[0], part), along(before[1], self._end[1], part)
            self._joints = self._joints + part * (self._end_joints - self._joints)
        self._left = max(self._left - 1, 0)
        self._ways[self._tick] = math.dist(before[0], self._reference[0]), math.dist(before[1], self._reference[1])
        self._tick = (self._tick + 1) % len(self._ways)
        at = self._average.push(np.array((*self._reference[0], *self._reference[1])))
        x, y, z, *turn = at.tolist()
        self._commanded = (x, y, z), (turn[0], turn[1], turn[2])
        return ToolTarget(self._space.pose(at.tolist()), self._width)

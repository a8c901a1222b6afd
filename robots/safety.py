"""Safety filter: turn goals from any source into commands within every limit of the cell.

``SafetyFilter.step`` makes one command per servo tick. A goal is admitted once, when it arrives: it
is refused if malformed, moved into the workspace and the cone, and shortened to what the step, the
budget per second, contact and joints allow (``admission.py``). A reference point then travels there
in a straight line in one control period. The command is a smooth average of past reference points,
which bounds speed, acceleration and jerk, and stops within all limits whenever the reference stops
(``smoothing.py``). An independent gate checks each command again (``command_gate.py``).

Limits of speed, acceleration and jerk shape every motion, which is not an intervention. A change of
where a goal ends is one, reported once per goal and rule. The filter is idempotent: ``admitted``,
given as a new goal in the same state, makes the same command without intervention (to 1e-9).
"""

from __future__ import annotations

import math

import numpy as np

from rlinf_vla.features.realworld.robot import RobotError, ToolState, ToolTarget

from .admission import Admission, Start
from .cell import Cell
from .command_filter import CommandFilter
from .command_gate import CommandGate
from .joint_accelerations import JointAccelerations
from .smoothing import Average
from .state_monitor import StateMonitor
from .workspace import Place, Workspace, along


class SafetyFilter(CommandFilter[ToolTarget, ToolState]):
    """Keep the commands of one arm within the limits of its cell."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self._cell = cell
        self._space = Workspace(cell)
        self._gate = CommandGate(cell)
        self._arm = cell.arm
        self._watch = StateMonitor(cell, self._space)
        self._average = Average(cell.windows)
        self._ways = np.zeros((round(cell.servo_hz), 2))
        """Metres and radians that the reference moved in each tick of the last second."""
        self._tick = 0
        self._reference: Place = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
        self._end = self._commanded = self._reference
        self._joints = self._end_joints = np.zeros(7)
        self._accelerations = JointAccelerations(cell.windows, cell.servo_hz)
        self._speeds = np.zeros(7), np.zeros(7)
        self._width: float | None = None

    @property
    def admitted(self) -> ToolTarget:
        """The target of the current motion: the last goal after all limits."""
        return ToolTarget(self._space.pose(self._end), self._width)

    def start(self, state: ToolState) -> None:
        """Start at rest at the measured pose. Raises RobotError where the arm must not start."""
        wrong = self._watch.misplaced(state)
        if wrong is not None:
            raise RobotError(wrong)
        place, _ = self._space.inside(self._space.place(state.pose, (0.0, 0.0, 0.0)))
        self._width = None
        self._gate_fault = None
        self._rest(place, state)

    def felt(self, state: ToolState) -> str | None:
        """Return the exceeded force or torque limit, or None; also valid while not commanding."""
        return self._watch.felt(state)

    def _fault(self, state: ToolState) -> str | None:
        return self._watch.fault(state)

    def _check(self, command: ToolTarget) -> str | None:
        return self._gate.check(command)

    def _rest(self, at: Place, state: ToolState) -> None:
        self._joints = state.joints.copy()
        self._accelerations.rest()
        self._reference = self._end = self._commanded = at
        self._hold()
        self._average.rest(np.array((*at[0], *at[1])))
        self._command = ToolTarget(self._space.pose(at), self._width)
        self._gate.rest(self._command)

    def _admit(self, goal: ToolTarget, state: ToolState) -> None:
        gone_m, gone_rad = self._ways.sum(axis=0).tolist()
        start = Start(
            self._reference, self._joints, gone_m, gone_rad, self._accelerations.range(self._ticks)
        )
        admission = Admission(self._cell, self._space, self._arm, goal, start, state)
        self._end = admission.end
        self._end_joints = admission.joints
        self._speeds = admission.speeds
        self._left = self._ticks
        self._width = self._width if admission.width is None else admission.width
        for rule, (before, after) in admission.changes.items():
            self._tell(state, rule, before, after)

    def _travel(self) -> ToolTarget:
        before = self._reference
        done = 1 - (self._left - 0.5) / self._ticks
        self._accelerations.push(
            (1 - done) * self._speeds[0] + done * self._speeds[1] if self._left else np.zeros(7)
        )
        if self._left == 1:
            self._reference = self._end
            self._joints = self._end_joints
        elif self._left:
            part = 1 / self._left
            self._reference = (
                along(before[0], self._end[0], part),
                along(before[1], self._end[1], part),
            )
            self._joints = self._joints + part * (self._end_joints - self._joints)
        self._left = max(self._left - 1, 0)
        self._ways[self._tick] = (
            math.dist(before[0], self._reference[0]),
            math.dist(before[1], self._reference[1]),
        )
        self._tick = (self._tick + 1) % len(self._ways)
        x, y, z, *turn = self._average.push(
            np.array((*self._reference[0], *self._reference[1]))
        ).tolist()
        self._commanded = (x, y, z), (turn[0], turn[1], turn[2])
        return ToolTarget(self._space.pose(self._commanded), self._width)

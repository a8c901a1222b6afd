"""How much of a goal is admitted: where the straight way to it ends, and which rules ended it there."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlinf_vla.robot import RobotState, ToolTarget, Vector
from rlinf_vla.rotations import Triple

from . import kinematics
from .cell import Cell
from .space import TOLERANCE, Place, Refused, Space, along, numbers, part_within

_REACHED = 1e-3
"""Metres or radians: joints are foretold to this."""
_ATTEMPTS, _CUTS = 7, 4
_ENDS = list(zip(kinematics.LOWER.tolist(), kinematics.UPPER.tolist(), strict=True))
_SHY = 0.9
"""Joints are no straight function of the way: a little less than the part that would be allowed if they were."""


@dataclass(frozen=True)
class Start:
    """Where the reference is, and how it came there."""

    place: Place
    joints: Vector
    """As foretold, radians ``[7]``."""
    gone_m: float
    """In the last second, as ``gone_rad``."""
    gone_rad: float


class Admission:
    """One goal's. ``end`` and ``joints`` are what was admitted, ``changes`` what was changed: rule -> before, after."""

    def __init__(self, cell: Cell, space: Space, arm: kinematics.Arm, goal: ToolTarget, start: Start, state: RobotState) -> None:
        self.end, self.joints = start.place, start.joints
        self.width: float | None = None
        self.changes: dict[str, tuple[float, float]] = {}
        self._cell, self._space, self._arm, self._start, self._state = cell, space, arm, start, state
        try:
            pose, width = numbers(goal)
        except Refused as refused:
            self.changes[refused.rule] = refused.value, refused.allowed
            return
        if width is not None:
            self._grip(width)
        self.end, outside = space.inside(space.place(pose, start.place[1]))
        self.changes.update(outside)
        self._in_time()
        self._near_the_arm()
        self._with_these_joints()

    def _grip(self, width: float) -> None:
        narrowest, widest = self._cell.gripper_width_m
        self.width = min(max(width, narrowest), widest)
        if self.width != width:
            self.changes["gripper_width_m"] = width, self.width

    def _in_time(self) -> None:
        """Within one step, and within what is left of the second."""
        (begin, begin_turn), (end, turn), cell, start = self._start.place, self.end, self._cell, self._start
        keys = ("max_translation_per_step_m", "max_speed_m_s", "max_translation_per_second_m")
        turn_keys = ("max_rotation_per_step_rad", "max_rotation_speed_rad_s", "max_rotation_per_second_rad")
        end = self._cut(begin, end, start.gone_m, cell.step_m, keys)
        self.end = end, self._cut(begin_turn, turn, start.gone_rad, cell.step_rad, turn_keys)

    def _cut(self, begin: Triple, end: Triple, gone: float, step: float, keys: tuple[str, str, str]) -> Triple:
        per_step, speed, per_second = keys
        way, longest, budget = math.dist(begin, end), step, getattr(self._cell, per_second)
        if way > step + TOLERANCE:
            if step < getattr(self._cell, per_step):
                self.changes[speed] = way * self._cell.control_hz, step * self._cell.control_hz
            else:
                self.changes[per_step] = way, step
        if gone + min(way, step) > budget + TOLERANCE:
            self.changes[per_second] = gone + min(way, step), budget
            longest = max(budget - gone, 0.0)
        return end if way <= longest + TOLERANCE else along(begin, end, longest / way)

    def _near_the_arm(self) -> None:
        """No further before the measured tool than the lead: an arm that is held up pulls no harder than so."""
        (begin, begin_turn), (end, turn), cell = self._start.place, self.end, self._cell
        at, turned = self._space.place(self._state.pose, begin_turn)
        end = self._lead(begin, end, at, cell.max_lead_m, "max_lead_m")
        self.end = end, self._lead(begin_turn, turn, turned, cell.max_lead_rad, "max_lead_rad")

    def _lead(self, begin: Triple, end: Triple, measured: Triple, lead: float, key: str) -> Triple:
        part = part_within(begin, end, measured, lead)
        if part == 1:
            return end
        self.changes[key] = math.dist(end, measured), lead
        return along(begin, end, part)

    def _with_these_joints(self) -> None:
        """As far as the joints, foretold from where they are measured, keep their margin and their speed."""
        (begin, begin_turn), (whole, whole_turn), part = self._start.place, self.end, 1.0
        if math.dist(begin, whole) <= TOLERANCE and math.dist(begin_turn, whole_turn) <= TOLERANCE:
            return
        for _ in range(_CUTS):
            joints = self._arm.reach(self._state.joints, self._space.pose((*self.end[0], *self.end[1])), _REACHED, _ATTEMPTS)
            allowed = self._allowed(joints)
            if joints is not None and allowed == 1:
                self.joints = joints
                return
            part *= _SHY * allowed
            self.end = along(begin, whole, part), along(begin_turn, whole_turn, part)
        self.end = self._start.place

    def _allowed(self, joints: Vector | None) -> float:
        """The part of the way from ``start.joints`` to ``joints`` that is; what is out of reach may be nearer at half the way."""
        margin, fastest = self._cell.joint_margin_rad, self._cell.max_joint_speed_rad_s / self._cell.control_hz
        if joints is None:
            self.changes.setdefault("joint_margin_rad", (0.0, margin))
            return 0.5
        part, before = 1.0, self._start.joints
        longest = 0.0
        for at, was_at, (low, high) in zip(joints.tolist(), before.tolist(), _ENDS, strict=True):
            longest = max(longest, abs(at - was_at))
            beyond = max(at - high, low - at) + margin
            if beyond > TOLERANCE:
                was = max(was_at - high, low - was_at) + margin
                if beyond > was + TOLERANCE:  # on its way out, not back in
                    part = min(part, max(-was, 0.0) / (beyond - was))
                    self.changes.setdefault("joint_margin_rad", (margin - beyond, margin))
        if longest > fastest + TOLERANCE:
            part = min(part, fastest / longest)
            self.changes.setdefault("max_joint_speed_rad_s", (longest * self._cell.control_hz, self._cell.max_joint_speed_rad_s))
        return part

"""Compute how far towards a goal the arm may move, and which limits shorten the path."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlinf_vla.core.rotations import Triple
from rlinf_vla.features.realworld.robot import ToolState, ToolTarget, Vector

from . import kinematics
from .cell import Cell
from .workspace import TOLERANCE, Place, Refused, Workspace, along, numbers, part_within

_REACHED = 1e-3
"""Tolerance of predicted joints, in metres or radians of the tool."""
_ATTEMPTS, _CUTS = 7, 4
_ENDS = list(zip(kinematics.LOWER.tolist(), kinematics.UPPER.tolist(), strict=True))
OWN_SHARE = 0.8
"""Share of the speed that the arm itself allows a joint at its position."""
SINGULAR = 0.04
"""Smallest singular value of the Jacobian (m and rad per rad) at the end of a path. Below, the
joints' speeds change too much within a path to predict their accelerations."""
_SHY = 0.9
"""Factor on the path fraction that would be allowed if joints were linear along the path."""


@dataclass(frozen=True)
class Start:
    """State of the reference point when the goal arrives."""

    place: Place
    joints: Vector
    """Predicted, radians ``[7]``."""
    gone_m: float
    """Path length in the last second, as ``gone_rad``."""
    gone_rad: float
    speeds: tuple[Vector, Vector]
    """Lowest and highest joint speeds that the joints' accelerations permit, rad/s ``[7]``."""


class Admission:
    """Admission of one goal.

    ``end`` and ``joints`` are the admitted target, and ``speeds`` those of the joints (rad/s
    ``[7]``) at the beginning and the end of the path. ``changes`` maps each rule that changed the
    goal to the values before and after.
    """

    def __init__(
        self,
        cell: Cell,
        space: Workspace,
        arm: kinematics.FrankaKinematics,
        goal: ToolTarget,
        start: Start,
        state: ToolState,
    ) -> None:
        self.end = start.place
        self.joints = start.joints
        self.speeds = np.zeros(7), np.zeros(7)
        self.width: float | None = None
        self.changes: dict[str, tuple[float, float]] = {}
        self._cell = cell
        self._space = space
        self._arm = arm
        self._start = start
        self._state = state
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
        """Shorten the path to one step and to the rest of the per-second budget."""
        (begin, begin_turn) = self._start.place
        (end, turn) = self.end
        cell = self._cell
        start = self._start
        keys = ("max_translation_per_step_m", "max_speed_m_s", "max_translation_per_second_m")
        turn_keys = (
            "max_rotation_per_step_rad",
            "max_rotation_speed_rad_s",
            "max_rotation_per_second_rad",
        )
        end = self._cut(begin, end, start.gone_m, cell.step_m, keys)
        self.end = end, self._cut(begin_turn, turn, start.gone_rad, cell.step_rad, turn_keys)

    def _cut(
        self, begin: Triple, end: Triple, gone: float, step: float, keys: tuple[str, str, str]
    ) -> Triple:
        per_step, speed, per_second = keys
        way = math.dist(begin, end)
        longest = step
        budget = getattr(self._cell, per_second)
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
        """Keep the goal within the lead of the measured tool, which bounds the force on contact."""
        (begin, begin_turn) = self._start.place
        (end, turn) = self.end
        cell = self._cell
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
        """Shorten the path until joints, predicted from the measured ones, keep their limits."""
        (begin, begin_turn) = self._start.place
        (whole, whole_turn) = self.end
        part = 1.0
        if math.dist(begin, whole) <= TOLERANCE and math.dist(begin_turn, whole_turn) <= TOLERANCE:
            return
        (inverse, smallest) = self._arm.inverse(self._start.joints)
        began = self._space.pose(self._start.place)
        for _ in range(_CUTS):
            pose = self._space.pose(self.end)
            joints = self._arm.reach(self._state.joints, pose, _REACHED, _ATTEMPTS)
            allowed = 0.5
            if joints is None:  # half the way may be reachable
                self.changes.setdefault("joint_margin_rad", (0.0, self._cell.joint_margin_rad))
            else:
                at_end, smallest_at_end = self._arm.inverse(joints)
                velocity = kinematics.velocity(began, pose, self._cell.control_hz)
                speeds = inverse @ velocity, at_end @ velocity
                allowed = min(
                    self._allowed(joints),
                    *map(self._steady, speeds),
                    self._dexterous(smallest, smallest_at_end),
                )
                if allowed == 1:
                    self.joints = joints
                    self.speeds = speeds
                    return
            part *= _SHY * allowed
            self.end = along(begin, whole, part), along(begin_turn, whole_turn, part)
        self.end = self._start.place

    def _allowed(self, joints: Vector) -> float:
        """Return the fraction of the way to ``joints`` that keeps margins and speeds."""
        margin, hz = self._cell.joint_margin_rad, self._cell.control_hz
        part = 1.0
        before = self._start.joints
        for joint, (at, was_at, (low, high)) in enumerate(
            zip(joints.tolist(), before.tolist(), _ENDS, strict=True)
        ):
            way = abs(at - was_at)
            allowed = self._speed(joint, at, at - was_at) / hz
            if way > allowed + TOLERANCE:
                part = min(part, allowed / way)
                self.changes.setdefault("max_joint_speed_rad_s", (way * hz, allowed * hz))
            beyond = max(at - high, low - at) + margin
            if beyond > TOLERANCE:
                was = max(was_at - high, low - was_at) + margin
                if beyond > was + TOLERANCE:  # moving outwards, not back in
                    part = min(part, max(-was, 0.0) / (beyond - was))
                    self.changes.setdefault("joint_margin_rad", (margin - beyond, margin))
        return part

    def _steady(self, speeds: Vector) -> float:
        """Return the fraction of joint speeds ``[7]`` that keeps the joints' accelerations."""
        part = 1.0
        for speed, low, high in zip(
            speeds.tolist(), *(limit.tolist() for limit in self._start.speeds), strict=True
        ):
            allowed = max(high, 0.0) if speed > 0 else min(low, 0.0)
            if abs(speed) > abs(allowed) + TOLERANCE * self._cell.control_hz:
                part = min(part, allowed / speed)
                self.changes.setdefault("joint_acceleration", (speed, allowed))
        return part

    def _dexterous(self, begin: float, end: float) -> float:
        """Return the fraction of the way that stays clear of singularities, or leads away.

        ``begin``, ``end``: smallest singular values.
        """
        if end >= min(SINGULAR, begin) - TOLERANCE:
            return 1.0
        self.changes.setdefault("singularity", (end, SINGULAR))
        return max(begin - SINGULAR, 0.0) / (begin - end)

    def _speed(self, joint: int, end: float, way: float) -> float:
        """Return the speed allowed on a path to ``end``: within the arm's own limit with some room,
        because it is a mean, and the arm follows like a spring."""
        return min(
            self._cell.max_joint_speed_rad_s, OWN_SHARE * kinematics.fastest(joint, end, way)
        )

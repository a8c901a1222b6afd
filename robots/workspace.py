"""Workspace of a cell's tool, in coordinates in which it is a convex set.

A pose is six numbers: the tool centre point in the base frame (m) and the rotation vector w (rad)
of ``reference * exp(w)``, where the reference is the centre orientation of the cell's cone. In
these coordinates the workspace is one convex set: a box, and a cylinder of w around the tool's
axis. The tilt satisfies ``sin(tilt / 2) = sin(|w| / 2) |across| / |w| <= |across| / 2``, so a
cylinder of radius ``2 sin(t / 2)`` is inside the cone of half-angle t at every twist. Without twist
it is 1 % narrower than the cone at 30 degrees.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from rlinf_vla.core import rotations
from rlinf_vla.core.rotations import Triple
from rlinf_vla.features.realworld.robot import ToolPose, ToolTarget

from .cell import Cell

BOX = ("workspace_x_m", "workspace_y_m", "workspace_z_m")

TOLERANCE = 1e-9
"""Metres or radians; smaller differences are not a change."""

Place = tuple[Triple, Triple]
"""Position, rotation vector."""

Changes = dict[str, tuple[float, float]]
"""Rule -> before, after."""


class Refused(ValueError):
    """A malformed goal: the rule it breaks, its value and the allowed one."""

    def __init__(self, rule: str, value: float, allowed: float) -> None:
        super().__init__(rule)
        self.rule = rule
        self.value = value
        self.allowed = allowed


class Workspace:
    """Allowed poses of a cell's tool."""

    def __init__(self, cell: Cell) -> None:
        self._box: list[tuple[str, float, float]] = [(key, *getattr(cell, key)) for key in BOX]
        self._reference = cell.reference
        self._to_reference = rotations.inverse(cell.reference)
        self._across = 2 * math.sin(math.radians(cell.max_tilt_deg) / 2)
        self._twist = math.radians(cell.max_twist_deg)

    def place(self, pose: ToolPose, near: Triple) -> Place:
        """Convert a pose with a unit quaternion, using the rotation vector nearer to ``near``."""
        x, y, z = pose.position.tolist()
        turn = rotations.multiply(self._to_reference, pose.quaternion.tolist())
        return (x, y, z), rotations.nearest_vector(turn, near)

    def pose(self, place: Place) -> ToolPose:
        """Convert a place back to a pose, with read-only arrays."""
        position = np.array(place[0])
        quaternion = np.array(rotations.multiply(self._reference, rotations.from_vector(place[1])))
        position.flags.writeable = quaternion.flags.writeable = (
            False  # a command that was sent must not change
        )
        return ToolPose(position, quaternion)

    def inside(self, place: Place) -> tuple[Place, Changes]:
        """Return the nearest allowed place, and the rules that changed it."""
        changes: Changes = {}
        position = list(place[0])
        for axis, (rule, low, high) in enumerate(self._box):
            if not low <= position[axis] <= high:
                into = min(max(position[axis], low), high)
                changes[rule] = position[axis], into
                position[axis] = into
        x, y, twist = place[1]
        across = math.hypot(x, y)
        if across > self._across + TOLERANCE:
            changes["max_tilt_deg"] = math.degrees(across), math.degrees(self._across)
            x, y = x * self._across / across, y * self._across / across
        if abs(twist) > self._twist + TOLERANCE:
            changes["max_twist_deg"] = (
                math.degrees(twist),
                math.degrees(math.copysign(self._twist, twist)),
            )
            twist = math.copysign(self._twist, twist)
        return ((position[0], position[1], position[2]), (x, y, twist)), changes


def numbers(goal: ToolTarget) -> tuple[ToolPose, float | None]:
    """Return a goal's pose, with a unit quaternion, and gripper width.

    Raises Refused for any malformed goal.
    """
    position, quaternion = _finite(goal.pose.position, 3), _finite(goal.pose.quaternion, 4)
    width = None if goal.gripper_width is None else _finite([goal.gripper_width], 1)[0]
    length = math.hypot(*quaternion)
    if not abs(length - 1) < 1e-3:
        raise Refused("unit_quaternion", min(length, sys.float_info.max), 1.0)
    return ToolPose(np.array(position), np.array(rotations.unit(quaternion))), width


def _finite(values: Any, length: int) -> list[float]:
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise Refused("shape", 0, length) from None
    if array.shape != (length,):
        raise Refused("shape", array.size, length)
    read: list[float] = array.tolist()
    if not all(map(math.isfinite, read)):
        bad = sum(not math.isfinite(value) for value in read)
        raise Refused("not_finite", bad, 0)
    return read


def along(begin: Triple, end: Triple, part: float) -> Triple:
    return (
        begin[0] + part * (end[0] - begin[0]),
        begin[1] + part * (end[1] - begin[1]),
        begin[2] + part * (end[2] - begin[2]),
    )


def part_within(begin: Triple, end: Triple, centre: Triple, radius: float) -> float:
    """Return the largest fraction of a straight path that stays within ``radius`` of ``centre``.

    It is 1 if the end is no further from ``centre`` than the beginning.
    """
    from_begin, from_end = math.dist(begin, centre), math.dist(end, centre)
    if from_end <= radius + TOLERANCE or from_end <= from_begin:
        return 1.0
    if from_begin >= radius:
        return 0.0
    way = [b - a for a, b in zip(begin, end, strict=True)]
    off = [a - c for a, c in zip(begin, centre, strict=True)]
    square = sum(w * w for w in way)
    half = sum(w * o for w, o in zip(way, off, strict=True))
    return (
        math.sqrt(half * half + square * (radius * radius - from_begin * from_begin)) - half
    ) / square

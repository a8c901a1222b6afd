"""Find the points of a cell's workspace box that the arm cannot reach; goals stop short of them."""

from __future__ import annotations

import itertools
import math

import numpy as np

from rlinf_vla.core.rotations import Triple

from . import kinematics
from .cell import Cell
from .workspace import BOX, Workspace, along

_LEVELS = 5
"""Points along each axis of the box, walls included."""
_STEP_M = 0.02
_REACHED, _ATTEMPTS = 1e-4, 20


def beyond(cell: Cell) -> dict[Triple, str]:
    """Return the unreachable ones of 125 points of the box (m, base frame), each with the reason.

    The tool points along ``orientation_axis``. The arm moves straight from home, with
    joints predicted as in the safety filter.
    """
    walls = [getattr(cell, key) for key in BOX]
    levels = [np.linspace(low, high, _LEVELS).round(4).tolist() for low, high in walls]
    arm, space = cell.arm, Workspace(cell)
    return {place: why for place in itertools.product(*levels) if (why := _why_not(cell, arm, space, place)) is not None}


def _why_not(cell: Cell, arm: kinematics.FrankaKinematics, space: Workspace, place: Triple) -> str | None:
    begin, turn = space.place(cell.home, (0.0, 0.0, 0.0))
    joints, steps = np.array(cell.home_joints_rad), max(1, math.ceil(math.dist(begin, place) / _STEP_M))
    for step in range(1, steps + 1):
        pose = space.pose((*along(begin, place, step / steps), *along(turn, (0.0, 0.0, 0.0), step / steps)))
        found = arm.reach(joints, pose, _REACHED, _ATTEMPTS)
        if found is None:
            return "too far"
        joints = found
    left = np.minimum(joints - kinematics.LOWER, kinematics.UPPER - joints)
    joint = int(left.argmin())
    return f"joint {joint + 1} at its limit" if left[joint] < cell.joint_margin_rad else None

"""Where in its own box an arm cannot have its tool: goals towards there end early, which a cell's author should know beforehand."""

from __future__ import annotations

import itertools
import math

import numpy as np

from rlinf_vla.rotations import Triple

from . import kinematics
from .cell import Cell
from .space import BOX, Space, along

_LEVELS = 5
"""Places along each axis of the box, walls included."""
_STEP_M = 0.02
_REACHED, _ATTEMPTS = 1e-4, 20


def beyond(cell: Cell) -> dict[Triple, str]:
    """Of 125 places throughout the box (m, the base's frame), those that the arm does not reach, and why.

    The tool points along ``orientation_axis``; the arm goes straight from home, as the safety filter foretells it.
    """
    walls = [getattr(cell, key) for key in BOX]
    levels = [np.linspace(low, high, _LEVELS).round(4).tolist() for low, high in walls]
    arm, space = cell.arm, Space(cell)
    return {place: why for place in itertools.product(*levels) if (why := _why_not(cell, arm, space, place)) is not None}


def _why_not(cell: Cell, arm: kinematics.Arm, space: Space, place: Triple) -> str | None:
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
    return f"joint {joint + 1} at its end" if left[joint] < cell.joint_margin_rad else None

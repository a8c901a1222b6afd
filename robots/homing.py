"""Find the way home: up first, then joint motions, checked against the workspace by kinematics."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from rlinf_vla.features.realworld.robot import RobotError, Vector

from . import kinematics
from .cell import Cell
from .workspace import BOX, Place, Workspace, along

LIFT_M = 0.1
"""How far the tool is lifted first, from below the rest position."""
TOLERANCE_M = 0.02
"""How far the way may lead outside: joints move only about in proportion, and the arm sags."""
_PARTS = (1, 2, 4)
"""Numbers of joint motions from the lifted pose to the rest position, to try in this order."""
_STEP_M, _STEP_RAD = 0.02, 0.02
_REACHED = 1e-4
_ATTEMPTS = 20


def way_home(cell: Cell, joints: Vector) -> list[Vector]:
    """Return joints to pass, radians ``[7]`` each; the last are the cell's rest position.

    The tool rises straight by LIFT_M, or to the height of the rest position if that is nearer. Then
    one joint motion leads home; if it would leave the workspace, several do, between points of the
    straight line (only from inside the workspace). If these do, too, the tool first rises to the
    height of the rest position. It does not rise where that is out of reach.

    Raises RobotError if each way leaves the workspace, further than it begins, or leads below both
    the beginning and the rest position.
    """
    space = Workspace(cell)
    begin = cell.arm.pose(joints)
    start = space.place(begin, (0.0, 0.0, 0.0))
    home = space.place(cell.home, (0.0, 0.0, 0.0))
    height = max(0.0, home[0][2] - start[0][2])
    wrong = ""
    inside = not space.inside(start)[1].keys() & set(BOX)
    # a straight line from outside might pass the arm's own base
    numbers = _PARTS if inside else _PARTS[:1]
    for lift, parts in itertools.product(
        dict.fromkeys((min(LIFT_M, height), height, 0.0)), numbers
    ):
        x, y, z = start[0]
        lifted = (x, y, z + lift), start[1]
        way = _through(cell, space, joints, [start, lifted, *_between(lifted, home, parts)])
        if way is not None:
            way.append(np.array(cell.home_joints_rad))
            objection = _objection(cell, begin.position, [joints, *way])
            if objection is None:
                return way
            wrong = wrong or objection
    raise RobotError(f"homing: {wrong}; guide the arm by hand")


def _between(begin: Place, end: Place, parts: int) -> list[Place]:
    """Return the places that divide the straight line into ``parts``, without its ends."""
    places: list[Any] = [
        tuple(along(a, b, part / parts) for a, b in zip(begin, end, strict=True))
        for part in range(1, parts)
    ]
    return places


def _through(
    cell: Cell, space: Workspace, joints: Vector, places: list[Place]
) -> list[Vector] | None:
    """Return the joints at all places but the first, or None if one is not reached."""
    way = []
    for before, after in itertools.pairwise(places):
        steps = math.ceil(math.dist(before[0], after[0]) / _STEP_M)
        if steps == 0:
            continue
        for step in range(1, steps + 1):
            (place,) = _between(before, after, steps)[step - 1 : step] or [after]
            reached = cell.arm.reach(joints, space.pose(place), _REACHED, _ATTEMPTS)
            if (
                reached is None
                or (reached <= kinematics.LOWER).any()
                or (reached >= kinematics.UPPER).any()
            ):
                return None
            joints = reached
        way.append(joints)
    return way


def _objection(cell: Cell, begin: Vector, way: list[Vector]) -> str | None:
    """Return where the tool would leave its limits on straight lines between these joints."""
    limits = np.array([getattr(cell, key) for key in BOX])
    lowest = max(limits[2, 0], min(float(begin[2]), float(cell.home.position[2])))
    low = np.minimum([limits[0, 0], limits[1, 0], lowest], begin) - TOLERANCE_M
    high = np.maximum(limits[:, 1], begin) + TOLERANCE_M
    for before, after in itertools.pairwise(way):
        samples = max(2, math.ceil(np.abs(after - before).max() / _STEP_RAD))
        for part in np.linspace(0.0, 1.0, samples):
            at = cell.arm.pose(before + part * (after - before)).position
            for key, value, least, most in zip(BOX, at, low, high, strict=True):
                if not least <= value <= most:
                    return f"{key}: the tool would pass {value:.3f} m on the way, outside [{least:.3f}, {most:.3f}]"
    return None

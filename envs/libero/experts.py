"""Scripted expert that picks up one object and puts it on or in another.

It is a function of the present state alone, including all true positions. Actions are robosuite's:
float64 ``[7]``, gripper -1 opens. Tolerances are wide and depend on the height, not on the past, so
that a disturbed arm corrects its motion instead of starting over.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .conventions import ROTATION_RAD, TRANSLATION_M

Array = NDArray[np.float64]

OPEN = -1.0
HOLD = 0.0
CLOSE = 1.0
UP = np.array([0.0, 0.0, 1.0])
GAIN = 4.0
"""A step covers about a quarter of the commanded distance."""
WIDEST = 0.07
"""Widest object grasped between the fingers (m); a wider one is grasped by its rim."""
HOVER, CARRY = 0.08, 0.05
"""Height above the object before the grasp, and above obstacles while carrying (m)."""
NEAR = 0.06
"""Margin around furniture (m)."""
PALM = 0.03
"""Distance from the tool centre point up to the palm (m)."""
HAND = (0.11, 0.045)
"""Half the size of the hand along and across the closing direction, with margin (m)."""
ROOM = 0.035
"""Opening of the fingers beyond the width of the object (m): neighbours may be near."""
EMPTY = 0.0015
"""Finger gap below which nothing is held (m)."""
YAWS = np.deg2rad([90, 60, 120, 30, 150, 0])
"""Closing directions of the fingers, the preferred first: the y axis, as at the start."""


def expert_action(env: Any) -> Array:
    """Action for the present state; the goal of ``env`` must be one object on or in another."""
    (_, thing, target), *_ = env.parsed_problem["goal_state"]
    corners = box_corners(env, env.obj_body_id[thing])
    low, high = corners.min(0), corners.max(0)
    goal, floor, rim, tolerance = destination(env, target)
    tool = env.sim.data.site_xpos[env.robots[0].eef_site_id]
    aside = goal - (low + high)[:2] / 2
    there = bool(np.linalg.norm(aside) < tolerance)
    if holds(env, thing):
        return carry(env, thing, tool, aside, low[2], there, floor, rim)
    if there and low[2] < rim:
        return towards(tool, tool + 0.03 * UP, 0.0, OPEN)
    return grasp(env, tool, env.obj_body_id[thing])


def carry(
    env: Any,
    thing: str,
    tool: Array,
    aside: Array,
    bottom: float,
    there: bool,
    floor: float,
    rim: float,
) -> Array:
    """Move the held object over its destination, lower its bottom to ``floor`` and release it.

    ``aside`` ``[2]`` is the horizontal offset to the destination (m).
    """
    if there and bottom < floor:
        return towards(tool, tool, 0.0, OPEN)
    if closed(env) < 0.3:
        return towards(tool, tool, 0.0, CLOSE)
    if there:
        return towards(tool, tool + np.append(aside, floor - 0.02 - bottom), 0.0, CLOSE)
    if rests(env, thing):
        return towards(tool, tool + 0.05 * UP, 0.0, CLOSE)
    up = max(rim + CARRY - bottom, over_fixtures(env, thing) - bottom, 0.0)
    move = aside if up < 0.03 else aside * 0.0
    return towards(tool, tool + np.append(move, up), 0.0, CLOSE)


def grasp(env: Any, tool: Array, body: int) -> Array:
    """Approach the object from above with open gripper, then close the fingers around it."""
    point, turn, opening = grasp_of(env, tool, body)
    aside = float(np.linalg.norm(point[:2] - tool[:2]))
    above = tool[2] - point[2]
    if gap(env) < EMPTY:
        return towards(tool, tool + 0.05 * UP, 0.0, OPEN)  # nothing was grasped: try again
    if aside < 0.012 and abs(above) < 0.012 and abs(turn) < 0.15:
        return towards(tool, point, turn, CLOSE)
    # Funnel: the tolerance grows with height. Low sideways moves would push the object: rise first.
    descend = aside < 0.01 + 0.2 * max(above, 0.0) and abs(turn) < 0.1
    sideways = aside < 0.02 or above > 0.05
    xy = point[:2] if sideways else tool[:2]
    spread = OPEN if gap(env) < opening - 0.005 else CLOSE if gap(env) > opening + 0.005 else HOLD
    return towards(tool, np.append(xy, point[2] if descend else point[2] + HOVER), turn, spread)


def grasp_of(env: Any, tool: Array, body: int) -> tuple[Array, float, float]:
    """Choose a grasp of ``body``.

    Returns the tool centre point ``[3]``, the turn of the tool about z (rad) and the finger opening
    (m).
    """
    fingers = env.sim.data.site_xmat[env.robots[0].eef_site_id].reshape(3, 3)[:, 0]
    present = np.arctan2(fingers[1], fingers[0])
    boxes = box_corners(env, body).reshape(-1, 8, 3)
    corners = boxes.reshape(-1, 3)
    low, high = corners.min(0), corners.max(0)
    middle = (low + high) / 2
    ways = []
    for yaw in YAWS:
        along = np.array([np.cos(yaw), np.sin(yaw)])
        aside = np.array([-np.sin(yaw), np.cos(yaw)])
        width, length = np.ptp(corners[:, :2] @ along), np.ptp(corners[:, :2] @ aside)
        if width < WIDEST:
            for shift in (0.0, 1.0, -1.0):
                centre = middle[:2] + shift * max(length / 2 - 0.012, 0.0) * aside
                ways.append(
                    (
                        np.array([*centre, max(high[2] - PALM, low[2] + 0.012)]),
                        yaw,
                        min(0.08, width + ROOM),
                    )
                )
    if ways:
        point, yaw, opening = next(
            (way for way in ways if hand_fits(env, body, way[0], way[1])), ways[0]
        )
        return point, shortest(yaw - present), opening
    rim = boxes[boxes.max(1)[:, 2] > high[2] - 0.01]
    walls = rim.mean(1)
    outwards = walls[:, :2] - middle[:2]
    turns = shortest(np.arctan2(outwards[:, 1], outwards[:, 0]) - present)
    best = int(np.argmin(np.abs(turns) + 5 * np.linalg.norm(walls[:, :2] - tool[:2], axis=1)))
    return np.array([*walls[best, :2], rim[best].max(0)[2] - 0.012]), float(turns[best]), ROOM


def hand_fits(env: Any, body: int, point: Array, yaw: float) -> bool:
    """Whether the hand, wide in the closing direction, comes down on no other object."""
    others = [
        box_corners(env, env.obj_body_id[name])
        for name in env.objects_dict
        if env.obj_body_id[name] != body
    ]
    high = np.concatenate([np.zeros((0, 3)), *others])
    near = high[high[:, 2] > point[2] + PALM][:, :2] - point[:2]
    along = near @ [np.cos(yaw), np.sin(yaw)]
    aside = near @ [-np.sin(yaw), np.cos(yaw)]
    return not ((np.abs(along) < HAND[0]) & (np.abs(aside) < HAND[1])).any()


def destination(env: Any, place: str) -> tuple[Array, float, float, float]:
    """Destination on an object, or in a region of one; all in metres.

    Returns its centre ``[2]``, the height of the carried object's bottom at release, the height of
    the rim to clear, and the horizontal tolerance.
    """
    if place in env.obj_body_id:
        corners = box_corners(env, env.obj_body_id[place])
        low, high = corners.min(0), corners.max(0)
        return (low + high)[:2] / 2, high[2] + 0.005, high[2], 0.015
    parent = env.object_sites_dict[place].parent_name
    rim = box_corners(env, env.obj_body_id[parent]).max(0)[2]
    return env.sim.data.get_site_xpos(place)[:2], rim + 0.02, rim, 0.03


def over_fixtures(env: Any, thing: str) -> float:
    """Height (m) that clears the furniture around the object; minus infinity without any."""
    where = box_corners(env, env.obj_body_id[thing]).mean(0)[:2]
    height = -np.inf
    for fixture in env.fixtures_dict:
        corners = box_corners(env, env.obj_body_id[fixture])
        if (
            len(corners)
            and (where > corners.min(0)[:2] - NEAR).all()
            and (where < corners.max(0)[:2] + NEAR).all()
        ):
            height = max(height, corners.max(0)[2] + 0.02)
    return height


def box_corners(env: Any, body: int) -> Array:
    """Corners ``[8 * boxes, 3]`` of the collision boxes of a body and its children.

    LIBERO's movable objects are made of boxes.
    """
    model, data = env.sim.model._model, env.sim.data._data
    bodies = {body}
    for child in range(body + 1, model.nbody):  # children come after their parents
        if model.body_parentid[child] in bodies:
            bodies.add(child)
    signs = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)])
    boxes = [
        geom
        for geom in range(model.ngeom)
        if model.geom_bodyid[geom] in bodies and model.geom_type[geom] == 6
    ]
    corners = [
        data.geom_xpos[geom] + signs * model.geom_size[geom] @ data.geom_xmat[geom].reshape(3, 3).T
        for geom in boxes
    ]
    return np.concatenate([np.zeros((0, 3)), *corners])


def holds(env: Any, thing: str) -> bool:
    """Whether both fingers touch the object."""
    geoms = env.robots[0].gripper.important_geoms
    return bool(
        env._check_grasp([geoms["left_finger"], geoms["right_finger"]], env.objects_dict[thing])
    )


def rests(env: Any, thing: str) -> bool:
    """Whether the object touches anything except the robot."""
    others = env.get_contacts(env.objects_dict[thing])
    return any(name is None or not name.startswith(("gripper", "robot")) for name in others)


def closed(env: Any) -> float:
    """Commanded gripper position, -1 (open) ... 1 (closed)."""
    return float(np.atleast_1d(env.robots[0].gripper.current_action)[-1])


def gap(env: Any) -> float:
    """Distance between the fingers (m)."""
    left, right = env.sim.data.qpos[env.robots[0]._ref_gripper_joint_pos_indexes]
    return float(left - right)


def shortest(angle: Any) -> Any:
    """Equivalent angle of two identical fingers, in -pi/2 ... pi/2."""
    return (angle + np.pi / 2) % np.pi - np.pi / 2


def towards(tool: Array, target: Array, turn: float, gripper: float) -> Array:
    move = np.clip(GAIN * (np.asarray(target) - tool) / TRANSLATION_M, -1, 1)
    return np.array([*move, 0.0, 0.0, np.clip(turn / ROTATION_RAD, -1, 1), gripper])

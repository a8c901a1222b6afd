"""Scripted experts, which are functions of the present state alone, so they can label any state.

They return ``pd_ee_delta_pos`` actions (dx, dy, dz, gripper) and know all positions, ``[N, 3]`` in
metres. Tolerances are wide and depend on the height, not on the past, so that a disturbed arm
corrects its motion.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

OPEN = 1.0
CLOSE = -1.0
GAIN = 2.0
"""A step covers about a third of the commanded distance, so a gain of 2 does not overshoot."""


def expert_actions(env: Any) -> Tensor:
    """Expert actions float32 ``[N, D]`` of a ManiSkill base environment; rotations stay zero."""
    action = EXPERTS[env.spec.id](env)
    rotations = env.single_action_space.shape[0] - action.shape[1]
    return torch.cat(
        [action[:, :3], action.new_zeros(len(action), rotations), action[:, 3:]], dim=1
    )


def _towards(env: Any, target: Tensor, gripper: Tensor | float) -> Tensor:
    """Action ``[N, 4]`` that moves the tool centre point to ``target`` ``[N, 3]``."""
    move = (GAIN * (target - env.agent.tcp.pose.p) / 0.1).clamp(-1, 1)
    grip = torch.as_tensor(gripper, dtype=move.dtype, device=move.device).expand(len(move))
    return torch.cat([move, grip[:, None]], dim=1)


def push_cube(env: Any) -> Tensor:
    """Move behind the cube, seen from the target, at its height, and push along x."""
    tcp = env.agent.tcp.pose.p
    cube = env.obj.pose.p
    goal = env.goal_region.pose.p
    behind = cube[:, 0] - tcp[:, 0]
    lateral_distance = (cube[:, 1] - tcp[:, 1]).abs()
    low = tcp[:, 2] < 0.045
    pushing = low & (behind > 0.02) & (lateral_distance < 0.025)
    start_x = cube[:, 0] - 0.06
    descending = (behind > 0.045) & (lateral_distance < 0.025)
    height = torch.where(pushing | descending, 0.02, torch.where(behind > 0.045, 0.02, 0.09))
    # Low sideways moves level with the cube would drag it along: rise first.
    free = pushing | descending | (behind > 0.045) | (tcp[:, 2] > 0.06)
    x = torch.where(pushing, goal[:, 0], torch.where(free, start_x, tcp[:, 0]))
    y = torch.where(free, cube[:, 1], tcp[:, 1])
    return _towards(env, torch.stack([x, y, height], dim=1), CLOSE)


def _grasp(env: Any, cube: Tensor) -> Tensor:
    """Action ``[N, 4]``: approach ``cube`` ``[N, 3]`` from above with open gripper and grasp it."""
    tcp = env.agent.tcp.pose.p
    finger = env.agent.robot.get_qpos()[:, -1]
    aside = (cube[:, :2] - tcp[:, :2]).norm(dim=1)
    above = tcp[:, 2] - cube[:, 2]
    between = (aside < 0.018) & (above.abs() < 0.018)
    # Funnel: the tolerance grows with height. Open the fingers before the descent.
    descend = (aside < 0.02 + 0.3 * above.clamp(min=0)) & (
        (finger > 0.03) | (above < 0.02) | (above > 0.05)
    )
    # Low sideways moves would push the cube and its neighbours: rise first.
    sideways = (aside < 0.03) | (above > 0.04)
    xy = torch.where(sideways[:, None], cube[:, :2], tcp[:, :2])
    z = torch.where(descend, cube[:, 2], cube[:, 2] + 0.07)
    return _towards(env, torch.cat([xy, z[:, None]], dim=1), torch.where(between, CLOSE, OPEN))


def _place(env: Any, cube: Tensor, goal: Tensor, tolerance: float) -> Tensor:
    """Action ``[N, 4]``: move the grasped ``cube`` over ``goal``, lower it and release it.

    ``goal`` is where the cube's centre shall rest; ``tolerance`` is horizontal, in metres.
    """
    aside = (goal[:, :2] - cube[:, :2]).norm(dim=1)
    height = cube[:, 2] - goal[:, 2]
    lower = aside < tolerance + 0.3 * height.clamp(min=0)
    sideways = (height > 0.02) | (aside < 2 * tolerance)
    xy = torch.where(sideways[:, None], goal[:, :2], cube[:, :2])
    z = torch.where(lower, goal[:, 2], goal[:, 2] + 0.05)
    arrived = (aside < tolerance) & (height < 0.008)
    move = torch.where(arrived[:, None], 0.0, torch.cat([xy, z[:, None]], dim=1) - cube)
    return _towards(env, env.agent.tcp.pose.p + move, torch.where(arrived, OPEN, CLOSE))


def _leave(env: Any) -> Tensor:
    """Action ``[N, 4]``: open, then rise once the fingers are off the cube, so that it stays."""
    tcp = env.agent.tcp.pose.p
    finger = env.agent.robot.get_qpos()[:, -1:]
    up = torch.tensor([0.0, 0.0, 0.05], device=tcp.device)
    return _towards(env, tcp + torch.where(finger > 0.036, up, 0.0), OPEN)


def _pick_and_place(
    env: Any, cube: Tensor, goal: Tensor, tolerance: float, grasped: Tensor, placed: Tensor
) -> Tensor:
    action = torch.where(grasped[:, None], _place(env, cube, goal, tolerance), _grasp(env, cube))
    return torch.where((placed & ~grasped)[:, None], _leave(env), action)


def pick_cube(env: Any) -> Tensor:
    cube, goal = env.cube.pose.p, env.goal_site.pose.p
    carry = _towards(env, goal + env.agent.tcp.pose.p - cube, CLOSE)
    return torch.where(env.agent.is_grasping(env.cube)[:, None], carry, _grasp(env, cube))


def stack_cube(env: Any) -> Tensor:
    cube, below = env.cubeA.pose.p, env.cubeB.pose.p
    goal = below + torch.tensor([0.0, 0.0, 0.04], device=below.device)
    state = env.evaluate()
    return _pick_and_place(
        env, cube, goal, 0.015, state["is_cubeA_grasped"], state["is_cubeA_on_cubeB"]
    )


def put_on_plate(env: Any) -> Tensor:
    from .put_on_plate import CUBE_HALF_SIZE, PLATE_HALF_THICKNESS

    goal = env.plate.pose.p + torch.tensor(
        [0.0, 0.0, PLATE_HALF_THICKNESS + CUBE_HALF_SIZE], device=env.device
    )
    cube = env.of_target(lambda cube: cube.pose.p)
    grasped = env.of_target(env.agent.is_grasping)
    return _pick_and_place(env, cube, goal, 0.03, grasped, env.evaluate()["is_on_plate"])


def put_on_plate_25(env: Any) -> Tensor:
    grasped = env.of_target(env.agent.is_grasping)
    return _pick_and_place(
        env,
        env.of_target(lambda thing: thing.pose.p),
        env.goal,
        0.02,
        grasped,
        env.evaluate()["is_on_plate"],
    )


EXPERTS = {
    "PushCube-v1": push_cube,
    "PickCube-v1": pick_cube,
    "StackCube-v1": stack_cube,
    "PutOnPlate-v1": put_on_plate,
    "PutOnPlate25-v1": put_on_plate_25,
}

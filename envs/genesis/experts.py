"""Scripted expert for every predicate.

It is a function of the present state alone, so it can label any state that a policy reaches.
Tolerances are wide and depend on the height, not on the past, so that a disturbed arm corrects its
motion.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .arm import TRANSLATION_M
from .predicates import Body, State, body, goal, held, holds
from .scene import Lifted, Predicate, Scene, subject

OPEN = 1.0
CLOSE = -1.0
GAIN = 0.5
"""Share of the remaining distance per step; the tool lags by about a step, so more overshoots."""
FASTEST = 0.7
"""Largest action (of 1). At full speed the joints lag unequally and the tool leaves its line."""


def expert_actions(scene: Scene, state: State) -> Tensor:
    """Actions ``[N, 4]``: dx, dy, dz in units of ``TRANSLATION_M``, and the gripper.

    Pursues the first predicate that does not hold.
    """
    action = _command(state, state.tool, OPEN)
    for predicate in reversed(scene.success):
        todo = _pursue(state, predicate)
        action = torch.where(holds(state, predicate)[:, None], action, todo)
    return action


def _pursue(state: State, predicate: Predicate) -> Tensor:
    thing = body(state, subject(predicate))
    target = goal(state, predicate)
    grasped = held(state, thing)
    if isinstance(predicate, Lifted):
        up = state.tool + torch.stack(
            [torch.zeros_like(thing.rise)] * 2 + [target[:, 2] + 0.02 - thing.centre[:, 2]], dim=1
        )
        return torch.where(grasped[:, None], _command(state, up, CLOSE), _grasp(state, thing))
    off = (target - thing.centre).abs()
    placed = (off[:, :2].norm(dim=1) < 0.04) & (off[:, 2] < 0.012)
    todo = torch.where(grasped[:, None], _place(state, thing, target), _grasp(state, thing))
    return torch.where((placed & ~grasped)[:, None], _leave(state), todo)


def _command(state: State, where: Tensor, gripper: Tensor | float) -> Tensor:
    """Action ``[N, 4]`` that moves the tool to ``where`` ``[N, 3]``."""
    move = (GAIN * (where - state.tool) / TRANSLATION_M).clamp(-FASTEST, FASTEST)
    return torch.cat(
        [
            move,
            torch.as_tensor(gripper, dtype=move.dtype, device=move.device).expand(len(move))[
                :, None
            ],
        ],
        dim=1,
    )


def _grasp(state: State, thing: Body) -> Tensor:
    """Approach the object from above with open gripper, then close the fingers around it."""
    tool, centre = state.tool, thing.centre
    aside = (centre[:, :2] - tool[:, :2]).norm(dim=1)
    above = tool[:, 2] - centre[:, 2]
    closing = state.finger < 0.03
    between = (aside < torch.where(closing, 0.025, 0.013)) & (
        above.abs() < torch.where(closing, 0.02, 0.012)
    )
    # Funnel: the tolerance grows with height. Open the fingers before the descent.
    descend = (aside < 0.015 + 0.3 * above.clamp(min=0)) & (
        (state.finger > 0.027) | (above < 0.015) | (above > 0.06)
    )
    # Low sideways moves would push the object and its neighbours: rise first.
    sideways = (aside < 0.025) | (above > 0.045)
    xy = torch.where(sideways[:, None], centre[:, :2], tool[:, :2])
    z = torch.where(descend, centre[:, 2], centre[:, 2] + 0.08)
    return _command(state, torch.cat([xy, z[:, None]], dim=1), torch.where(between, CLOSE, OPEN))


def _place(state: State, thing: Body, target: Tensor) -> Tensor:
    """Move the held object over its destination, lower it and release it."""
    aside = (target[:, :2] - thing.centre[:, :2]).norm(dim=1)
    height = thing.centre[:, 2] - target[:, 2]
    lower = aside < 0.02 + 0.3 * height.clamp(min=0)
    sideways = (height > 0.02) | (aside < 0.04)
    xy = torch.where(sideways[:, None], target[:, :2], thing.centre[:, :2])
    z = torch.where(lower, target[:, 2], target[:, 2] + 0.05)
    arrived = (aside < 0.03) & (height < 0.008)
    move = torch.where(arrived[:, None], 0.0, torch.cat([xy, z[:, None]], dim=1) - thing.centre)
    return _command(state, state.tool + move, torch.where(arrived, OPEN, CLOSE))


def _leave(state: State) -> Tensor:
    """Open, then rise once the fingers are clear of the object, so that it stays in place."""
    up = state.tool.new_tensor([0.0, 0.0, 0.08])
    return _command(state, state.tool + torch.where(state.finger[:, None] > 0.03, up, 0.0), OPEN)

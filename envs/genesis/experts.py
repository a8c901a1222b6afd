"""A scripted expert for every predicate. It is a function of the present state alone, so it can label any state that a policy gets into.

Tolerances are wide and depend on the height, not on the past, so that a disturbed arm corrects its way instead of starting over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .goals import OPEN_M, Body, State, body, goal, held, holds, subject
from .scene import Cylinder, Lifted, Predicate, Scene, Sphere

OPEN, CLOSE = 1.0, -1.0
GAIN = 0.5
"""Share of the remaining way that one step commands: the tool follows its target within about a step, so more would overshoot."""
FASTEST = 0.7
"""Of a possible 1: at full speed the joints, which do not lag alike, let the tool stray from its line."""
GRASP_YAW_DEG = 30.0
"""A box that is turned further does not fit between the fingers, which the expert never turns."""


def why_no_expert(scene: Scene) -> str | None:
    """One line where the expert cannot grasp what a predicate wants moved."""
    for predicate in scene.success:
        name = subject(predicate)
        for each in scene.target if name not in scene.things else (name,):
            thing = scene.things[each]
            turned = not isinstance(thing.shape, Sphere | Cylinder) and max(map(abs, thing.yaw_deg)) > GRASP_YAW_DEG
            if thing.half_m[1] > OPEN_M - 0.002 or turned:
                return f"the scripted expert grasps along y, up to {2 * OPEN_M:.3f} m: {each} of the scene {scene.name} is wider or turned"
    return None


def expert_actions(scene: Scene, state: State, translation_m: float) -> Tensor:
    """``[N, 4]``: dx, dy, dz in units of ``translation_m``, and the gripper. Attends to the first predicate that does not hold."""
    action = _command(state, state.tool, OPEN, translation_m)
    for predicate in reversed(scene.success):
        todo = _pursue(scene, state, predicate, translation_m)
        action = torch.where(holds(scene, state, predicate)[:, None], action, todo)
    return action


def _pursue(scene: Scene, state: State, predicate: Predicate, unit: float) -> Tensor:
    thing, place = body(state, subject(predicate)), goal(scene, state, predicate)
    grasped = held(state, thing)
    if isinstance(predicate, Lifted):
        up = state.tool + torch.stack([torch.zeros_like(thing.rise)] * 2 + [place[:, 2] + 0.02 - thing.centre[:, 2]], dim=1)
        return torch.where(grasped[:, None], _command(state, up, CLOSE, unit), _grasp(state, thing, unit))
    off = (place - thing.centre).abs()
    placed = (off[:, :2].norm(dim=1) < 0.04) & (off[:, 2] < 0.012)
    todo = torch.where(grasped[:, None], _place(state, thing, place, unit), _grasp(state, thing, unit))
    return torch.where((placed & ~grasped)[:, None], _leave(state, unit), todo)


def _command(state: State, where: Tensor, gripper: Tensor | float, unit: float) -> Tensor:
    """``[N, 4]``: move the tool to ``where`` ``[N, 3]``."""
    move = (GAIN * (where - state.tool) / unit).clamp(-FASTEST, FASTEST)
    return torch.cat([move, torch.as_tensor(gripper, dtype=move.dtype, device=move.device).expand(len(move))[:, None]], dim=1)


def _grasp(state: State, thing: Body, unit: float) -> Tensor:
    """The way to having it between closed fingers, coming from above with the gripper open."""
    tool, centre = state.tool, thing.centre
    aside = (centre[:, :2] - tool[:, :2]).norm(dim=1)
    above = tool[:, 2] - centre[:, 2]
    closing = state.finger < 0.03
    between = (aside < torch.where(closing, 0.025, 0.013)) & (above.abs() < torch.where(closing, 0.02, 0.012))
    # A funnel: the higher, the less exact. Fingers must be wide before they come down.
    descend = (aside < 0.015 + 0.3 * above.clamp(min=0)) & ((state.finger > 0.027) | (above < 0.015) | (above > 0.06))
    # Low beside it, sideways moves would push it and its neighbours: rise first.
    sideways = (aside < 0.025) | (above > 0.045)
    xy = torch.where(sideways[:, None], centre[:, :2], tool[:, :2])
    z = torch.where(descend, centre[:, 2], centre[:, 2] + 0.08)
    return _command(state, torch.cat([xy, z[:, None]], dim=1), torch.where(between, CLOSE, OPEN), unit)


def _place(state: State, thing: Body, place: Tensor, unit: float) -> Tensor:
    """Bring what is in hand over its place, lower it, let go."""
    aside = (place[:, :2] - thing.centre[:, :2]).norm(dim=1)
    height = thing.centre[:, 2] - place[:, 2]
    lower = aside < 0.02 + 0.3 * height.clamp(min=0)
    sideways = (height > 0.02) | (aside < 0.04)
    xy = torch.where(sideways[:, None], place[:, :2], thing.centre[:, :2])
    z = torch.where(lower, place[:, 2], place[:, 2] + 0.05)
    arrived = (aside < 0.03) & (height < 0.008)
    move = torch.where(arrived[:, None], 0.0, torch.cat([xy, z[:, None]], dim=1) - thing.centre)
    return _command(state, state.tool + move, torch.where(arrived, OPEN, CLOSE), unit)


def _leave(state: State, unit: float) -> Tensor:
    """Open, then straight up; not before the fingers are off it, or it comes along."""
    up = state.tool.new_tensor([0.0, 0.0, 0.08])
    return _command(state, state.tool + torch.where(state.finger[:, None] > 0.03, up, 0.0), OPEN, unit)

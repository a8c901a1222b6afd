"""Evaluate success and progress of a scene from its present state, in batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from . import rotations
from .scene import OPEN_M, TARGET, Cylinder, Lifted, On, Predicate, Scene, Sphere, subject

STILL_M_S = 0.03
TOUCH_M = 0.006
"""Largest gap or overlap of objects that touch."""
HALF_WAY = 0.5
"""Progress of holding the object, times 0.9; success is 1."""
REACHED = 0.25
"""Progress once the tool is at the object."""


@dataclass(frozen=True)
class Shapes:
    """Shapes of ``K`` objects."""

    names: tuple[str, ...]
    half: Tensor
    """Half length, width and height (m): ``[K, 3]``."""
    cylinder: Tensor
    """bool ``[K]``"""
    sphere: Tensor
    """bool ``[K]``"""
    kinds: tuple[type, ...]
    chosen: Tensor
    """Indices of the objects that ``Scene.target`` names, int64."""

    @classmethod
    def of(cls, scene: Scene, device: torch.device) -> Shapes:
        names = tuple(scene.things)
        things = scene.things.values()
        return cls(
            names,
            torch.tensor(
                [thing.half_m.tolist() for thing in things], dtype=torch.float32, device=device
            ),
            torch.tensor([isinstance(thing.shape, Cylinder) for thing in things], device=device),
            torch.tensor([isinstance(thing.shape, Sphere) for thing in things], device=device),
            tuple(type(thing.shape) for thing in things),
            torch.tensor(
                [names.index(name) for name in scene.target], dtype=torch.int64, device=device
            ),
        )


@dataclass(frozen=True)
class State:
    """``N`` environments with ``K`` objects, in metres and in the frame of the robot's base."""

    joints: Tensor
    """``[N, 9]``: arm joints (rad) and fingers (m)."""
    tool: Tensor
    """Tool centre point ``[N, 3]``."""
    tool_quaternion: Tensor
    """``[N, 4]`` (w x y z)"""
    finger: Tensor
    """``[N]``: distance of one finger from closed."""
    finger_speed: Tensor
    """``[N]`` m/s"""
    centre: Tensor
    """``[N, K, 3]``"""
    quaternion: Tensor
    """``[N, K, 4]``"""
    up: Tensor
    """``[N, K, 3]``: the vertical axis in each object's frame."""
    speed: Tensor
    """``[N, K]`` m/s; zero unless ``asks_for_rest``."""
    target: Tensor
    """int64 ``[N]``: index into ``Scene.target`` of the object that the episode drew."""
    shapes: Shapes

    @cached_property
    def rise(self) -> Tensor:
        """``[N, K]``: half the vertical extent of each object in its present orientation."""
        half = self.shapes.half
        up = self.up
        rise = (half * up.abs()).sum(-1)
        if Cylinder in self.shapes.kinds:
            lying = (
                half[:, 0] * (1 - up[..., 2].square()).clamp(min=0).sqrt()
                + half[:, 2] * up[..., 2].abs()
            )
            rise = torch.where(self.shapes.cylinder, lying, rise)
        if Sphere in self.shapes.kinds:
            rise = torch.where(self.shapes.sphere, half[:, 2], rise)
        return rise


class Body(NamedTuple):
    """One object per environment: a fixed name, or the object that ``target`` drew there."""

    centre: Tensor
    """``[N, 3]``"""
    speed: Tensor
    """``[N]``"""
    half: Tensor
    """``[N, 3]``: half length, width and height in its own frame."""
    rise: Tensor
    """``[N]``: half the vertical extent in its present orientation."""

    @property
    def low(self) -> Tensor:
        """``[N]``: height of the lowest point."""
        return self.centre[:, 2] - self.rise


def body(state: State, name: str) -> Body:
    """Select the object ``name`` (or ``target``) of each environment."""
    half = state.shapes.half
    everyone = len(state.target)
    if name != TARGET:
        index = state.shapes.names.index(name)
        return Body(
            state.centre[:, index],
            state.speed[:, index],
            half[index].expand(everyone, 3),
            state.rise[:, index],
        )
    drawn = state.shapes.chosen[state.target]
    row = torch.arange(everyone, device=state.target.device)
    return Body(
        state.centre[row, drawn], state.speed[row, drawn], half[drawn], state.rise[row, drawn]
    )


def holds(state: State, predicate: Predicate) -> Tensor:
    """bool ``[N]``: whether the predicate holds."""
    if isinstance(predicate, Lifted):
        return body(state, predicate.object).low >= predicate.height_m
    if isinstance(predicate, On):
        above, below = body(state, predicate.above), body(state, predicate.below)
        touches = (above.low - below.centre[:, 2] - below.rise).abs() < TOUCH_M
        return touches & _over(state, predicate.below, above) & _at_rest(state, above)
    thing = body(state, predicate.object)
    region = predicate.region
    inside = torch.ones_like(thing.speed, dtype=torch.bool)
    for axis, interval in enumerate((region.x_m, region.y_m, region.z_m)):
        if interval is not None:
            inside &= (thing.centre[:, axis] >= interval[0]) & (
                thing.centre[:, axis] <= interval[1]
            )
    return inside if region.z_m is not None else inside & _at_rest(state, thing)


def asks_for_rest(scene: Scene) -> bool:
    """Whether a predicate depends on speeds."""
    return not all(isinstance(predicate, Lifted) for predicate in scene.success)


def success(scene: Scene, state: State) -> Tensor:
    """bool ``[N]``: whether all predicates of the scene hold."""
    return torch.stack([holds(state, predicate) for predicate in scene.success]).all(0)


def progress(scene: Scene, state: State) -> Tensor:
    """Progress ``[N]``, at most 1, averaged over all predicates.

    A predicate that does not hold gives up to ``REACHED`` for the tool's approach to the object,
    and 0.9 * ``HALF_WAY`` to 0.9 for the transport of the held object.
    """
    done = []
    for predicate in scene.success:
        thing = body(state, subject(predicate))
        reach = REACHED * _near(state.tool - thing.centre)
        carried = HALF_WAY * (1 + _near(goal(state, predicate) - thing.centre)) * 0.9
        part = torch.where(held(state, thing), carried, reach)
        done.append(torch.where(holds(state, predicate), 1.0, part))
    return torch.stack(done).mean(0)


def goal(state: State, predicate: Predicate) -> Tensor:
    """Goal position ``[N, 3]`` of the centre of the moved object."""
    thing = body(state, subject(predicate))
    if isinstance(predicate, On):
        below = body(state, predicate.below)
        return torch.cat(
            [below.centre[:, :2], (below.centre[:, 2] + below.rise + thing.rise)[:, None]], dim=1
        )
    if isinstance(predicate, Lifted):
        return torch.cat([thing.centre[:, :2], (predicate.height_m + thing.rise)[:, None]], dim=1)
    region = predicate.region
    x, y = (torch.full_like(thing.rise, sum(interval) / 2) for interval in (region.x_m, region.y_m))
    z = torch.full_like(thing.rise, sum(region.z_m) / 2) if region.z_m else thing.rise
    return torch.stack([x, y, z], dim=1)


def held(state: State, thing: Body) -> Tensor:
    """bool ``[N]``: the fingers are closed around the object."""
    off = (state.tool - thing.centre).abs()
    between = (off[:, :2].amax(1) < 0.025) & (off[:, 2] < thing.rise + 0.01)
    widest = thing.half[:, :2].norm(dim=1)
    stopped = (
        (state.finger < OPEN_M)
        & (state.finger < widest + 0.003)
        & (state.finger_speed.abs() < 0.03)
    )
    return between & stopped & (state.finger > 0.5 * thing.half[:, :2].amin(1))


def _at_rest(state: State, thing: Body) -> Tensor:
    """bool ``[N]``: the object is still and released."""
    away = (state.tool - thing.centre).norm(dim=1) > thing.half.norm(dim=1) + 0.02
    wide_open = state.finger > torch.minimum(
        thing.half[:, :2].amin(1) + 0.004, state.finger.new_tensor(OPEN_M)
    )
    return (thing.speed < STILL_M_S) & (away | wide_open)


def _over(state: State, below: str, above: Body) -> Tensor:
    """bool ``[N]``: the centre of ``above`` is over the object ``below``, seen from above."""
    index = state.shapes.names.index(below)
    offset = rotations.turned(
        rotations.conjugate(state.quaternion[:, index]), above.centre - state.centre[:, index]
    )
    half = state.shapes.half[index]
    if state.shapes.kinds[index] is Cylinder:
        return offset[:, :2].norm(dim=1) < half[0]
    return (offset[:, :2].abs() < half[:2]).all(1)


def _near(offset: Tensor) -> Tensor:
    """``[N]``: 1 at distance 0, falling towards 0 with the distance."""
    return 1 - torch.tanh(5 * offset.norm(dim=1))

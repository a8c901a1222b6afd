"""The spec of vector environments, and validation of their arguments, for all simulators."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_vla.core.devices import CPU
from rlinf_vla.core.protocols import Convention, EnvSpec, ToolUnits
from rlinf_vla.core.types import Episodes

from .shared_arrays import SimulatorSpec


def spec_of(
    found: SimulatorSpec,
    num_envs: int,
    episode_limit: int,
    tasks: tuple[str, ...],
    device: torch.device = CPU,
) -> EnvSpec:
    """Return the spec of a vector environment of ``num_envs`` such simulators."""
    return EnvSpec(
        num_envs=num_envs,
        action_dim=found.action_dim,
        state_dim=found.state_dim,
        control_hz=found.control_hz,
        episode_limit=episode_limit,
        images={name: (height, width) for name, (height, width) in found.images.items()},
        tasks=tasks,
        device=device,
        tool=None if found.tool is None else ToolUnits(*found.tool),
        stack=found.stack,
        native=None
        if found.native is None
        else Convention(**found.native | {"tool": ToolUnits(*found.native["tool"])}),
        instructions=tuple(found.instructions),
        starts=found.starts,
    )


def checked_episodes(spec: EnvSpec, episodes: Episodes, mask: Tensor | None) -> list[int]:
    """Return the rows to reset. Raises ValueError for invalid shapes, seeds or task ids."""
    everyone = (spec.num_envs,)
    _check_shape(episodes.seed, everyone, "episodes.seed")
    _check_shape(episodes.task_id, everyone, "episodes.task_id")
    if mask is not None:
        _check_shape(mask, everyone, "mask")
    rows: list[int] = (
        list(range(spec.num_envs)) if mask is None else mask.bool().nonzero().flatten().tolist()
    )
    seeds, task_ids = episodes.seed.tolist(), episodes.task_id.tolist()
    for row in rows:
        if not 0 <= seeds[row] < 2**32:
            raise ValueError(
                f"episodes.seed[{row}] is {seeds[row]}; a seed lies in 0 ... 2**32 - 1"
            )
        if not 0 <= task_ids[row] < len(spec.tasks):
            raise ValueError(
                f"episodes.task_id[{row}] is {task_ids[row]}; there are {len(spec.tasks)} tasks"
            )
    return rows


def checked_actions(spec: EnvSpec, actions: Tensor) -> Tensor:
    """Return ``actions`` as float32 ``[B, C, D]`` on the CPU.

    Raises ValueError for another shape and for NaN or infinity.
    """
    if actions.ndim != 3 or actions.shape[1] == 0:
        raise ValueError(
            f"actions have shape {list(actions.shape)}, not [{spec.num_envs}, chunk, {spec.action_dim}]"
        )
    _check_shape(actions, (spec.num_envs, actions.shape[1], spec.action_dim), "actions")
    if not actions.isfinite().all():
        row = int((~actions.isfinite()).nonzero()[0, 0])
        raise ValueError(f"actions[{row}] are not finite")
    return actions.detach().to("cpu", torch.float32)


def _check_shape(tensor: Tensor, shape: tuple[int, ...], name: str) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, not {list(shape)}")

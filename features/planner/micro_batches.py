"""Choose the largest micro-batch that a device has room for, or say what would have room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlinf_vla.config.checks import may_offload
from rlinf_vla.config.cluster import IN_PROCESS, NodeConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.features.planner.budget import (
    Budget,
    Setting,
    budget,
    most_rows_of,
    room_in,
    share_a_device,
)
from rlinf_vla.features.planner.memory import MemoryModel
from rlinf_vla.features.planner.plan import SLACK

ENOUGH_ROWS = 16
"""Rows from which on a larger micro-batch is not worth the time of gradient checkpointing."""
MANY = (2, 4, 8, 16)
"""Numbers of GPUs of which the least that has room is named, where one has none."""


def choose(
    model: MemoryModel, memory: float, given: Setting | None = None, exact: bool = True
) -> Setting:
    """Return the setting with the largest micro-batch whose peak leaves 10 % of ``memory`` free.

    Gradient checkpointing only if otherwise fewer than ``ENOUGH_ROWS`` fit, smaller policy calls
    only if no micro-batch fits, off-loading only if roles share a device and nothing fits without.
    ``given``: keep its other keys. ``exact``: count at the chosen size, too. Raises UserError, with
    the fix, if nothing fits.
    """
    recipe = model.recipe
    most = most_rows_of(model)
    size = model.recipe.rollout.batch_size
    for offload in (False, True)[: 1 + _takes_turns(recipe)] if given is None else (given.offload,):
        for batch in (
            [size >> shift for shift in range(size.bit_length())] if given is None else (size,)
        ):
            best = Setting(0, batch, False, offload, model.replay is not None)
            for checkpointing in (
                (False, True) if given is None else (given.gradient_checkpointing,)
            ):
                trial = replace(best, gradient_checkpointing=checkpointing)
                if best.micro_batch_size < min(ENOUGH_ROWS, most) and (
                    rows := _most_rows(model, trial, memory, most, exact)
                ):
                    best = max(
                        best,
                        replace(trial, micro_batch_size=rows),
                        key=lambda setting: setting.micro_batch_size,
                    )
            if best.micro_batch_size:
                return best
    what = f"{recipe.name} with cluster.device={recipe.cluster.device}"
    if given is not None:
        raise UserError(
            f"{what} does not fit {memory / 1e9:.1f} GB: set {choose(model, memory, exact=exact).overrides()}"
        )
    peak = least(model, memory, exact).peak / 1e9
    raise UserError(
        f"{what} needs at least {peak:.1f} GB of a device's memory, {room_in(memory)}: {_fix(model, memory, exact)}"
    )


def least(model: MemoryModel, memory: float, exact: bool = True) -> Budget:
    """Return the memory of a device with single rows, and whatever saves memory."""
    return budget(model, Setting(1, 1, True, _takes_turns(model.recipe)), memory, exact)


def _takes_turns(recipe: Recipe) -> bool:
    """Whether off-loading would help: roles share a device, and not at the same time."""
    return recipe.cluster.runtime != IN_PROCESS and may_offload(recipe) and share_a_device(recipe)


def _fix(model: MemoryModel, memory: float, exact: bool) -> str:
    recipe = model.recipe
    smallest = least(model, memory, exact)
    for part in smallest.parts:
        if part.without and replace(smallest, memory=memory + part.size / SLACK).fits:
            return f"set {part.without}"
    if model.takes_bfloat16:
        return "set model.options.dtype=bfloat16"
    if model.replay is not None:
        freeze = hasattr(recipe.algorithm, "frozen_backbone")
        return "lower algorithm.batch_size" + ", or set algorithm.frozen_backbone=true" * freeze
    if recipe.model.lora.rank or recipe.model.lora.adapter:
        return "use a device with more memory"
    many = _devices_for(model, memory, exact)
    shard = (
        "shard the trainer over more GPUs (cluster.trainer_sharding=full)"
        if many is None
        else f"use {many}"
    )
    return f"train adapters (model.lora.rank=32), or {shard}"


def _devices_for(model: MemoryModel, memory: float, exact: bool) -> str | None:
    """Return in words how many devices hold the sharded policy; None: more than ``MANY``."""
    recipe = model.recipe
    for count in MANY:
        keys: dict[str, Any] = {
            "runtime": "ray",
            "rollout_workers": count,
            "trainer_ranks": count,
            "trainer_sharding": "full",
        }
        node = NodeConfig(gpus=count, gpu="gpu", gpu_memory_gb=memory / 1e9)
        model.recipe = replace(recipe, cluster=replace(recipe.cluster, nodes=[node], **keys))
        try:
            if least(model, memory, exact).fits:
                return f"{count} such GPUs ({' '.join(f'cluster.{key}={value}' for key, value in keys.items())})"
        finally:
            model.recipe = recipe
    return None


def _most_rows(model: MemoryModel, setting: Setting, memory: float, most: int, exact: bool) -> int:
    """Return the largest power of two of rows that fits, or ``most``; 0 if one row does not.

    Whole batches are of ``most`` rows."""

    def fits(rows: int, exact: bool) -> bool:
        return budget(model, replace(setting, micro_batch_size=rows), memory, exact).fits

    smaller = (
        ()
        if setting.whole
        else (1 << shift for shift in reversed(range(most.bit_length())) if 1 << shift < most)
    )
    likely = [rows for rows in (most, *smaller) if fits(rows, exact=False)]
    return next((rows for rows in likely if not exact or fits(rows, exact=True)), 0)

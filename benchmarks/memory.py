"""Benchmark the memory that is counted in advance: hold it against measured peaks on the CPU.

``rlinf-vla bench memory recipe=NAME`` loads the recipe's policy, acts once and trains one
micro-batch, in this process. It compares the growth of resident memory (VmHWM) of each with what
the planner counts on the meta device. With ``model.options.random_weights=true`` it first writes
random weights to a temporary directory, and loads those.

The C library keeps freed memory, and so a process grows by more than its tensors. Set
``MALLOC_MMAP_THRESHOLD_=65536`` to have every tensor of 64 KiB or more returned when it is freed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.types import Episodes
from rlinf_vla.features.planner.memory import MemoryModel, weights_of
from rlinf_vla.features.planner.synthetic import observation, synthetic_batch
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.runtime import builders, recipes
from rlinf_vla.telemetry.measurement import peak_growth

CPU = torch.device("cpu")
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"


def run(config: DictConfig) -> None:
    """Print counted and measured bytes of load, one policy call and one micro-batch."""
    recipe = recipes.read(config)
    if recipe.cluster.device != "cpu":
        raise UserError("bench memory measures the CPU: use cluster=laptop")
    model = MemoryModel(recipe)
    rows = recipe.cluster.rows
    calls = recipe.rollout.batch_size
    counted = {
        "load": weights_of(model.policy).all,
        "act": model.rollout(calls),
        "micro-batch": model.update(rows, recipe.cluster.gradient_checkpointing),
    }
    with tempfile.TemporaryDirectory(prefix="rlinf-vla-") as folder:
        measured = measure(stored(recipe, Path(folder)), model)
    returned = (
        f"{THRESHOLD}={os.environ[THRESHOLD]}"
        if THRESHOLD in os.environ
        else f"not returned at once, as without {THRESHOLD}"
    )
    print(
        f"{recipe.model.checkpoint}: policy calls of {calls} rows, micro-batches of {rows}; freed memory: {returned}"
    )
    print("| | counted, MB | measured, MB | counted / measured |\n|---|---|---|---|")
    for name in [*counted, "all"]:
        counted_bytes, measured_bytes = (
            sum(sizes.values()) if name == "all" else sizes[name] for sizes in (counted, measured)
        )
        print(
            f"| {name} | {counted_bytes / 1e6:.1f} | {measured_bytes / 1e6:.1f} | {counted_bytes / measured_bytes:.2f} |"
        )


def stored(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with its random weights, if it has such, written to ``folder``."""
    if not getattr(recipe.model.options, "random_weights", False):
        return recipe
    builders.build_policy(recipe, lora=False).save(folder)
    return replace(
        recipe,
        model=replace(
            recipe.model,
            checkpoint=str(folder),
            options=replace(recipe.model.options, random_weights=False),
        ),
    )


def measure(recipe: Recipe, model: MemoryModel) -> dict[str, int]:
    """Return the measured bytes of the second pass of each kind: libraries allocate in the first.

    Gradients exist before the second micro-batch, and are not part of it.
    """
    held: list[Any] = []

    def load() -> None:
        held[:] = [builders.build_policy(recipe)]

    def second(call: Callable[[], Any]) -> int:
        call()
        return peak_growth(call, CPU)

    load()
    held.clear()
    measured = {"load": peak_growth(load, CPU)}
    policy = held[0]
    rows = recipe.cluster.rows
    calls = recipe.rollout.batch_size
    actor = Actor(policy, builders.actor_settings(recipe, recipe.rollout.temperature))
    numbers = torch.arange(calls)
    inputs = policy.prepare(observation(policy.spec, calls))
    episodes = Episodes.first_attempts(0 * numbers, numbers)
    measured["act"] = second(lambda: actor.act(inputs, episodes, 0 * numbers))
    batch = synthetic_batch(recipe, policy, model.algorithm, max(rows, calls))
    if model.kept:
        with torch.no_grad():
            batch = replace(
                batch, calls=replace(batch.calls, inputs=policy.precompute(batch.calls.inputs))
            )
    measured["micro-batch"] = second(
        lambda: model.algorithm.loss(policy, batch[torch.arange(rows)], False)[0].backward()
    )
    return measured

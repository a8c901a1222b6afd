"""Benchmark the memory that is counted in advance: hold it against measured peaks on the CPU.

``rlinf-vla bench memory recipe=NAME`` loads the recipe's policy with random weights, acts once and
trains one micro-batch, in this process. It compares the growth of resident memory (VmHWM) of each
with what the planner counts on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from omegaconf import DictConfig

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.types import Episodes
from rlinf_vla.planner.memory import MemoryModel, weights_of
from rlinf_vla.planner.synthetic import observation, synthetic_batch
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.runtime import builders, recipes
from rlinf_vla.telemetry.measurement import peak_growth

CPU = torch.device("cpu")


def run(config: DictConfig) -> None:
    """Print counted and measured bytes of load, one policy call and one micro-batch."""
    recipe = recipes.read(config)
    if recipe.cluster.device != "cpu":
        raise UserError("bench memory measures the CPU: use cluster=laptop")
    model, rows, calls = MemoryModel(recipe), recipe.cluster.rows, recipe.rollout.batch_size
    random = replace(recipe, model=replace(recipe.model, options=replace(recipe.model.options, random_weights=True)))
    weights = weights_of(model.policy)
    checkpointing = recipe.cluster.gradient_checkpointing
    counted = {"load": weights.all, "act": model.rollout(calls), "micro-batch": model.update(rows, checkpointing) + weights.gradients}
    held: list[Any] = []
    measured = {"load": peak_growth(lambda: held.append(builders.build_policy(random)), CPU)}
    policy = held[0]
    batch = synthetic_batch(recipe, policy, model.algorithm, max(rows, calls))[:rows]
    if model.kept:
        with torch.no_grad():
            batch = replace(batch, calls=replace(batch.calls, inputs=policy.precompute(batch.calls.inputs)))
    actor, numbers = Actor(policy, builders.actor_settings(recipe, recipe.rollout.temperature)), torch.arange(calls)
    inputs = policy.prepare(observation(policy.spec, calls, CPU))

    def train() -> None:
        model.algorithm.loss(policy, batch, False)[0].backward()

    passes: dict[str, Callable[[], Any]] = {
        "act": lambda: actor.act(inputs, Episodes.first_attempts(0 * numbers, numbers), numbers),
        "micro-batch": train,
    }
    for name, call in passes.items():
        for _ in range(2):  # the first also counts what libraries allocate once
            policy.zero_grad(set_to_none=True)
            measured[name] = peak_growth(call, CPU)
    print(f"{recipe.model.checkpoint}: policy calls of {calls} rows, micro-batches of {rows}")
    print("| | counted, MB | measured, MB | counted / measured |\n|---|---|---|---|")
    for name in [*counted, "all"]:
        said, found = (sum(each.values()) if name == "all" else each[name] for each in (counted, measured))
        print(f"| {name} | {said / 1e6:.1f} | {found / 1e6:.1f} | {said / found:.2f} |")

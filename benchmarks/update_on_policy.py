"""Measure speed and memory of the PPO and GRPO update under several equivalent plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.algorithms.on_policy import Batch, OnPolicy
from rlinf_vla.benchmarks import roofline
from rlinf_vla.benchmarks.update_measurements import (
    Memory,
    UpdateMeasurements,
    Work,
    measured_memory,
)
from rlinf_vla.config.cluster import ClusterConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.protocols import Policy, precompute_frozen
from rlinf_vla.features.planner import work as counting
from rlinf_vla.features.planner.accounting import kernels_of
from rlinf_vla.features.planner.memory import MemoryModel
from rlinf_vla.features.planner.synthetic import synthetic_batch, with_frozen_weights
from rlinf_vla.runtime import builders
from rlinf_vla.runtime.workers.trainer import OnPolicyUpdater
from rlinf_vla.telemetry.measurement import nbytes, saved_for_backward
from rlinf_vla.training.trainer import Trainer

REPEATS = 3
MINIBATCHES = 2
SPLIT = 4
"""Micro-batches per minibatch if the recipe's own micro-batch size does not split it."""


def measure(
    recipe: Recipe, policy: Policy, limits: roofline.Limits, say: Callable[[str], None]
) -> UpdateMeasurements:
    """Measure updates on ``MINIBATCHES`` minibatches of synthetic policy calls.

    ``limits``: of the policy's device.
    """
    recipe = with_frozen_weights(recipe)
    config = recipe.algorithm
    algorithm: OnPolicy = builders.build_algorithm(recipe)
    batch = synthetic_batch(recipe, policy, algorithm, MINIBATCHES * config.minibatch_size)
    one = {name: value[:1] for name, value in batch.calls.inputs.items()}
    with torch.no_grad():
        again = config.epochs > 1 and policy.precompute(one) is not one
    measurements = UpdateMeasurements(
        f"{config.name}: {len(batch)} policy calls, {config.epochs} epochs of minibatches of {config.minibatch_size}",
        limits,
    )
    norms: dict[str, float] = {}
    kinds: dict[str, Work] = {}
    for name, cluster in _clusters(recipe.cluster, config.minibatch_size, again).items():
        say(f"memory of {name}")
        plan = replace(recipe, cluster=cluster)
        settings = builders.actor_settings(plan, recipe.rollout.temperature)
        trainer = builders.build_trainer(plan, policy)
        updater = OnPolicyUpdater(
            trainer, settings.run_seed, settings.temperature, bool(cluster.reuse_frozen)
        )

        def update(updater: OnPolicyUpdater = updater, name: str = name) -> None:
            norms[name] = updater.update(batch, algorithm, False, 0, 0)["actor/grad_norm"]

        measurements.memory[name] = _memory(
            plan, algorithm, batch, trainer, update, again and bool(cluster.reuse_frozen)
        )
        kinds[name] = Work(update, len(batch) * config.epochs, "policy calls", model_work(plan))
    say(f"{REPEATS} updates under each plan")
    measurements.time(kinds, batch.advantage.device, REPEATS)
    whole, *others = kinds
    for name in others:
        measurements.compare(f"{name} / {whole}", name, whole)
        measurements.differences[f"gradient norms of {name} and {whole}"] = abs(
            norms[name] / norms[whole] - 1
        )
    return measurements


def _clusters(cluster: ClusterConfig, minibatch: int, again: bool) -> dict[str, ClusterConfig]:
    """``again``: without ``reuse_frozen``, every epoch would compute the frozen part again."""
    rows = cluster.rows if cluster.rows < minibatch else max(1, minibatch // SPLIT)
    whole = replace(cluster, micro_batch_size=minibatch, reuse_frozen=True)
    plans = {
        "whole minibatches": whole,
        f"micro-batches of {rows}": replace(whole, micro_batch_size=rows),
    }
    if again:
        plans["without reuse_frozen"] = replace(whole, reuse_frozen=False)
    return plans


def model_work(recipe: Recipe) -> counting.Work | None:
    """Count an update on ``MINIBATCHES`` minibatches, on the meta device.

    Forward passes, and backward passes for what needs gradients. Leaves out what gradient
    checkpointing computes again, and the optimiser. None if the model cannot be built there.
    """
    try:
        model = MemoryModel(recipe)
    except UserError:
        return None
    config = recipe.algorithm
    rows = recipe.cluster.rows
    weights = list(model.policy.parameters())

    def step(size: int) -> counting.Work:
        batch = model.batch(size)
        return counting.work(lambda: model.loss(model.policy, batch).backward(), weights)

    @torch.no_grad()
    def frozen(size: int) -> counting.Work:
        return counting.work(lambda: model.policy.precompute(model.inputs(size)), weights)

    def of_blocks(block: Callable[[int], counting.Work], count: int) -> counting.Work:
        whole, rest = divmod(count, rows)
        work = block(rows) * whole if whole else counting.Work()
        return work + block(rest) if rest else work

    with kernels_of(recipe.cluster.torch_device):
        total = of_blocks(step, config.minibatch_size) * (MINIBATCHES * config.epochs)
        return (
            total + of_blocks(frozen, MINIBATCHES * config.minibatch_size) if model.kept else total
        )


def _memory(
    recipe: Recipe,
    algorithm: OnPolicy,
    batch: Batch,
    trainer: Trainer,
    update: Callable[[], Any],
    remembers: bool,
) -> Memory:
    """Measure the memory of the trainer's first ``update``.

    A separate trainer measures the activations, because this one must not have made a step yet.
    ``remembers``: the update stores what the frozen part computes.
    """
    policy: Policy = trainer.policy  # type: ignore[assignment]
    trained = list(trainer.parameters.values())
    config = algorithm.config
    weights = [*policy.parameters(), *policy.buffers()]
    part = batch[: config.minibatch_size]
    computed = 0
    if remembers:
        inputs = precompute_frozen(policy, part.calls.inputs, recipe.cluster.rows)
        part = replace(part, calls=replace(part.calls, inputs=inputs))
        computed = nbytes(inputs.values()) * len(batch) // len(part)

    def loss(policy: Policy, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return algorithm.loss(policy, part, False)

    besides = [*weights, *part.tensors()]
    activations = saved_for_backward(
        lambda: builders.build_trainer(recipe, policy).step(part, loss), besides
    )
    reference = nbytes(trained) if config.kl_coef > 0 else 0
    return measured_memory(
        update, weights, trained, batch.tensors(), reference, activations, computed
    )

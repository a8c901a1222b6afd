"""Speed and memory of the update of PPO and GRPO, under several plans for the same mathematics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.algorithms.on_policy import Batch, OnPolicy
from rlinf_vla.commands import session
from rlinf_vla.commands.findings import Findings, Memory, Work, measured_memory
from rlinf_vla.flow.learning import fixed
from rlinf_vla.flow.runtime import InProcessFlow
from rlinf_vla.protocols import Policy
from rlinf_vla.recipe import Recipe
from rlinf_vla.recipe.cluster import ClusterConfig
from rlinf_vla.rollout import synthetic
from rlinf_vla.telemetry.memory import nbytes, saved_for_backward
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.training.trainer import Trainer

REPEATS = 3
MINIBATCHES = 2
SPLIT = 4
"""Into so many micro-batches, where the recipe's own size would leave a minibatch whole."""
STILL = {"learning_rate": 0.0, "value_learning_rate": 0.0, "target_kl": None, "sft_coef": 0.0}
"""The weights stay where they are, so that every plan and every repeat has the same to do; the expert's demonstrations need a simulator."""


def measure(recipe: Recipe, policy: Policy, say: Callable[[str], None]) -> Findings:
    """An update on ``MINIBATCHES`` minibatches of made-up policy calls."""
    recipe = still(recipe)
    config = recipe.algorithm
    algorithm: OnPolicy = session.build_algorithm(recipe)
    batch = made_up_batch(recipe, policy, algorithm, MINIBATCHES * config.minibatch_size)
    one = {name: value[:1] for name, value in batch.calls.inputs.items()}
    with torch.no_grad():
        again = config.epochs > 1 and policy.fix(one) is not one
    found = Findings(f"{config.name}: {len(batch)} policy calls, {config.epochs} epochs of minibatches of {config.minibatch_size}")
    flows: dict[str, InProcessFlow] = {}
    kinds: dict[str, Work] = {}
    for name, cluster in _clusters(recipe.cluster, config.minibatch_size, again).items():
        say(f"memory of {name}")
        plan = replace(recipe, cluster=cluster)
        settings = session.actor_settings(plan, recipe.rollout.temperature)
        flow = InProcessFlow(policy, [], _trainer(plan, policy), settings, Timeline(), reuse_frozen=cluster.reuse_frozen)
        update = partial(flow.update, batch, algorithm)
        found.memory[name] = _memory(plan, algorithm, batch, flow, update, again and cluster.reuse_frozen)
        flows[name], kinds[name] = flow, Work(update, len(batch) * config.epochs, "policy calls")
    say(f"{REPEATS} updates under each plan")
    found.time(kinds, batch.advantage.device, REPEATS)
    whole, *others = kinds
    norm = flows[whole].metrics["actor/grad_norm"]
    for name in others:
        found.compare(f"{name} / {whole}", name, whole)
        found.differences[f"gradient norms of {name} and {whole}"] = abs(flows[name].metrics["actor/grad_norm"] / norm - 1)
    return found


def still(recipe: Recipe) -> Recipe:
    """The same, but that its updates leave the weights where they are."""
    return replace(recipe, algorithm=replace(recipe.algorithm, **{k: v for k, v in STILL.items() if hasattr(recipe.algorithm, k)}))


def _clusters(cluster: ClusterConfig, minibatch: int, again: bool) -> dict[str, ClusterConfig]:
    """``again``: what is frozen would be computed again in each epoch, were it not remembered."""
    rows = cluster.micro_batch_size if cluster.micro_batch_size < minibatch else max(1, minibatch // SPLIT)
    whole = replace(cluster, micro_batch_size=minibatch, reuse_frozen=True)
    plans = {"whole minibatches": whole, f"micro-batches of {rows}": replace(whole, micro_batch_size=rows)}
    if again:
        plans["without reuse_frozen"] = replace(whole, reuse_frozen=False)
    return plans


def _memory(recipe: Recipe, algorithm: OnPolicy, batch: Batch, flow: InProcessFlow, update: Callable[[], Any], remembers: bool) -> Memory:
    """One step by a trainer of its own says what autograd keeps; the flow's has made none. ``remembers``: what is frozen, per update."""
    policy, trained, config = flow.policy, list(flow.trainer.parameters.values()), algorithm.config
    weights = [*policy.parameters(), *policy.buffers()]
    part, computed = batch[: config.minibatch_size], 0
    if remembers:
        inputs = fixed(policy, part.calls.inputs, recipe.cluster.micro_batch_size)
        part = replace(part, calls=replace(part.calls, inputs=inputs))
        computed = nbytes(inputs.values()) * len(batch) // len(part)

    def loss(policy: Policy, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return algorithm.loss(policy, part, False)

    besides = [*weights, *tensors_of(part)]
    activations = saved_for_backward(lambda: _trainer(recipe, policy).step(part, loss), besides)
    reference = nbytes(trained) if config.kl_coef > 0 else 0
    return measured_memory(update, weights, trained, tensors_of(batch), reference, activations, computed)


def _trainer(recipe: Recipe, policy: Policy) -> Trainer:
    trainer = session.build_trainer(recipe, policy)
    assert isinstance(trainer, Trainer)
    return trainer


def made_up_batch(recipe: Recipe, policy: Policy, algorithm: OnPolicy, count: int) -> Batch:
    """``count`` policy calls at random pictures."""
    config = recipe.algorithm
    settings = session.actor_settings(recipe, recipe.rollout.temperature)
    calls = synthetic.calls(policy, count, settings, getattr(config, "group_size", 1))
    advantage, target = torch.randn(2, len(calls), generator=torch.Generator().manual_seed(2)).to(calls.value.device)
    if config.kl_coef:
        calls = replace(calls, reference=calls.log_prob)
    batch = algorithm.weighted(calls, advantage)
    return replace(batch, target=target) if algorithm.value_coef else batch


def tensors_of(batch: Batch) -> list[Tensor]:
    found: list[Any] = [*vars(batch).values(), *vars(batch.calls).values(), *batch.calls.inputs.values(), *batch.calls.latent.values()]
    return [each for each in found if isinstance(each, Tensor)]

"""Profile this machine: measure each operation of a recipe's macro flow at several sizes.

Measurements use the recipe's policy and simulator.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_vla.algorithms.on_policy import Batch, OnPolicy
from rlinf_vla.algorithms.parity import FLOAT32, unit_of
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import ON_POLICY, Recipe
from rlinf_vla.core.devices import synchronise, threads
from rlinf_vla.core.protocols import Policy, precompute_frozen, prepared
from rlinf_vla.core.types import Episodes
from rlinf_vla.features.planner import synthetic
from rlinf_vla.features.planner.measure_rollout import measure_rollout
from rlinf_vla.features.planner.profile import GPU, Bytes, Cost, Profile, fit
from rlinf_vla.features.planner.synthetic import synthetic_batch, with_frozen_weights
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.rollout.split import head_weights
from rlinf_vla.runtime import builders
from rlinf_vla.runtime.machines import this_machine
from rlinf_vla.runtime.workers.trainer import OnPolicyUpdater
from rlinf_vla.telemetry.measurement import nbytes, saved_for_backward
from rlinf_vla.training.lora import merged_lora
from rlinf_vla.training.trainer import Trainer

CALLS = 3
SECONDS = 3.0
"""Calls per kind and size; no further call starts after this many seconds."""


def measure_profile(
    recipe: Recipe, policy: Policy, say: Callable[[str], None] = lambda text: None
) -> Profile:
    """Measure a profile with the recipe's policy and environments, which run an episode each.

    Raises UserError unless the algorithm is on-policy.
    """
    if recipe.algorithm.family != ON_POLICY:
        raise UserError(
            f"algorithm={recipe.algorithm.name} has one plan, in process: there is nothing to measure for it"
        )
    device = torch.device(recipe.cluster.torch_device)
    with threads(recipe.cluster.rollout_threads):
        say("measuring the policy in rollouts")
        operations = _acting(recipe, policy, device)
    with threads(recipe.cluster.update_threads):
        say("measuring updates")
        learning, stored = _learning(with_frozen_weights(recipe), policy, device)
    node = this_machine(device.type)
    profile = Profile(
        device=node.device,
        cores=node.cpus,
        operations=operations | learning,
        bytes=replace(stored, **_split(policy)),
        chunk=policy.spec.chunk,
        episode_limit=0,  # known to the simulators
        rounded=unit_of(policy) > FLOAT32,
        note=f"measured on {node.gpu or 'a CPU'} with {node.cpus} cores: {recipe.name}, model {recipe.model.name}, {recipe.env.name}",
    )
    with threads(recipe.cluster.rollout_threads):
        return measure_rollout(recipe, policy, profile, say)


def cost_of(
    kinds: Mapping[float, Callable[[], Any]], device: torch.device, calls: int = CALLS
) -> Cost:
    """Fit the cost of calls as a function of their size, from the median of each size.

    On a CPU: core-seconds of this process and the number of cores in use. On a GPU: its seconds.
    Waiting threads sleep (``OMP_WAIT_POLICY=passive``), so the core-seconds of all threads divided
    by those of the calling thread are the cores in use, whatever else the machine does.
    """
    sizes: list[float] = []
    costs: list[float] = []
    cores = list[float]()
    kinds[min(kinds)]()  # warm-up: one-off work
    for size, call in kinds.items():
        durations = list[float]()
        end = time.perf_counter() + SECONDS
        while len(durations) < calls and (not durations or time.perf_counter() < end):
            synchronise(device)
            wall, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
            call()
            synchronise(device)
            wall = time.perf_counter() - wall
            cpu = time.process_time() - cpu
            own = time.thread_time() - own
            durations.append(cpu if device.type == "cpu" else wall)
            cores.append(cpu / own)
        sizes.append(size)
        costs.append(statistics.median(durations))
    fixed_cost, per_item = fit(sizes, costs)
    if device.type != "cpu":
        return Cost(fixed_cost, per_item, on=GPU)
    return Cost(fixed_cost, per_item, min(statistics.median(cores), float(torch.get_num_threads())))


def fixed_cost_of(call: Callable[[], Any], device: torch.device) -> Cost:
    """Measure the cost of a call that has no size."""
    cost = cost_of({1: call}, device)
    return replace(cost, fixed=cost.of(1), per_item=0.0)


def _acting(recipe: Recipe, policy: Policy, device: torch.device) -> dict[str, Cost]:
    actor = Actor(policy, builders.actor_settings(recipe, recipe.rollout.temperature))
    block = min(recipe.rollout.batch_size, recipe.env.num_envs)
    observations = {rows: synthetic.observation(policy.spec, rows) for rows in (block, 2 * block)}

    def act(rows: int) -> None:
        numbers = torch.arange(rows)
        actor.act(
            prepared(policy, observations[rows]),
            Episodes(0 * numbers, numbers, 0 * numbers),
            0 * numbers,
        )

    def value(rows: int) -> None:
        actor.values(prepared(policy, observations[rows]))

    @torch.inference_mode()
    def encode(rows: int) -> None:
        for start in range(0, rows, block):
            inputs = prepared(policy, observations[rows])
            policy.encode({name: tensor[start : start + block] for name, tensor in inputs.items()})

    def merge() -> None:
        with merged_lora(policy):
            pass

    costs = {"merge": fixed_cost_of(merge, device)}
    with merged_lora(policy):
        for name, kind in (("act", act), ("value", value), ("encode", encode)):
            costs[name] = cost_of({rows: partial(kind, rows) for rows in observations}, device)
    return costs


def _learning(
    recipe: Recipe, policy: Policy, device: torch.device
) -> tuple[dict[str, Cost], Bytes]:
    config = recipe.algorithm
    algorithm: OnPolicy = builders.build_algorithm(recipe)
    most = min(config.minibatch_size, recipe.cluster.rows)
    sizes = sorted({max(1, most // 4), most})
    batch = synthetic_batch(recipe, policy, algorithm, most)
    trainer = builders.build_trainer(recipe, policy)
    assert isinstance(trainer, Trainer)
    learning = OnPolicyUpdater(
        trainer, recipe.seed, recipe.rollout.temperature, bool(recipe.cluster.reuse_frozen)
    )
    inputs = batch.calls.inputs
    costs = dict[str, Cost]()
    if recipe.cluster.reuse_frozen and config.epochs > 1:
        learnt = precompute_frozen(policy, inputs, most)
        if learnt is not inputs:
            costs["precompute"] = cost_of(
                {
                    n: partial(
                        precompute_frozen,
                        policy,
                        {name: value[:n] for name, value in inputs.items()},
                        n,
                    )
                    for n in sizes
                },
                device,
            )
            batch = replace(batch, calls=replace(batch.calls, inputs=learnt))

    def loss(learner: Policy, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return algorithm.loss(learner, part, False)

    def optimise() -> None:
        nn.utils.clip_grad_norm_(trainer.trained.values(), config.max_grad_norm)
        trainer.optimizers["policy"].step()

    def publish() -> None:
        copies = {
            name: parameter.detach().cpu().clone() for name, parameter in trainer.parameters.items()
        }
        with torch.no_grad():
            for name, parameter in trainer.parameters.items():
                parameter.copy_(copies[name])

    step = cost_of({n: partial(trainer.step, batch[:n], loss) for n in sizes}, device)
    costs["optimise"] = fixed_cost_of(optimise, device)
    costs["update"] = replace(step, fixed=max(0.0, step.fixed - costs["optimise"].fixed))
    costs["reference"] = cost_of(
        {n: partial(learning.log_prob, batch.calls[:n]) for n in sizes}, device
    )
    costs["publish"] = fixed_cost_of(publish, device)
    weights = [*policy.parameters(), *policy.buffers()]
    besides = [*weights, *batch.tensors()]
    saved = saved_for_backward(lambda: trainer.step(batch[: sizes[0]], loss), besides)
    parts = [
        *inputs.values(),
        *batch.calls.latent.values(),
        *(value for value in vars(batch.calls).values() if isinstance(value, Tensor)),
    ]
    return costs, Bytes(
        weights=nbytes(weights),
        trained=nbytes(trainer.parameters.values()),
        low=nbytes(trainer.parameters[name] for name in trainer.low),
        activations=saved / sizes[0],
        call=nbytes(parts) / most,
        inputs=nbytes(inputs.values()) / most,
    )


@torch.inference_mode()
def _split(policy: Policy) -> dict[str, float]:
    """Return bytes of features and head of a policy that can be split; empty if it cannot."""
    if policy.split_unsupported is not None:
        return {}
    features = policy.pack(policy.encode(prepared(policy, synthetic.observation(policy.spec, 1))))
    head = head_weights(policy, policy.state_dict())
    return {"features": float(nbytes(features.values())), "head": float(nbytes(head.values()))}

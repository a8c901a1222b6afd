"""Benchmark the latency of policy inference and of its evaluation in an update.

``rlinf-vla bench policy`` compares inference with the model's reference implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from rlinf_vla.benchmarks import harness
from rlinf_vla.benchmarks.roofline import Limits, Reached, limits_of
from rlinf_vla.core.devices import threads
from rlinf_vla.core.protocols import Policy, prepared
from rlinf_vla.core.types import Episodes, Observation
from rlinf_vla.features.planner import synthetic
from rlinf_vla.features.planner.work import work
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.runtime import builders, recipes
from rlinf_vla.telemetry.measurement import time_interleaved
from rlinf_vla.training.lora import network_dtype

WARMUP, CALLS = 3, 100
SECONDS = 60.0
"""Time limit per batch size: no further turn starts after it."""


@dataclass(frozen=True)
class Latency:
    """Latency of one kind of call.

    ``best_ms``: the least disturbed call. ``actions_per_s``: actions that the median call chooses
    or evaluates per second. ``reached``: of the device's limits, by the best call; with gradient
    checkpointing, what is computed again counts as work.
    """

    batch: int
    kind: str
    calls: int
    best_ms: float
    p50_ms: float
    p99_ms: float
    actions_per_s: float
    reached: Reached


def run(config: DictConfig) -> None:
    """Measure batch sizes 1 and ``rollout.batch_size``; print a table, write bench_policy.json."""
    recipe = recipes.read(config)
    policy = builders.build_policy(recipe)
    report = harness.Report(config, "bench_policy")
    console = report.console
    measured: list[Latency] = []
    ratios: dict[str, dict[str, float]] = {}
    agreement: dict[str, float] = {}
    with threads(recipe.cluster.rollout_threads), console.status("starting") as status:
        limits = limits_of(torch.device(recipe.cluster.torch_device), network_dtype(policy))
        for batch in sorted({1, recipe.rollout.batch_size}):
            status.update(f"batch {batch}")
            observation = synthetic.observation(policy.spec, batch)
            latencies, same = measure(
                policy, observation, recipe.rollout.temperature, recipe.cluster.cuda_graphs, limits
            )
            measured += latencies
            if same is not None:
                plain, act = (
                    next(latency for latency in latencies if latency.kind == kind)
                    for kind in ("plain", "act")
                )
                ratios[f"batch {batch}"] = {
                    "best": plain.best_ms / act.best_ms,
                    "p50": plain.p50_ms / act.p50_ms,
                }
                agreement[f"batch {batch}"] = same
    rows = []
    for latency in measured:
        numbers = (latency.best_ms, latency.p50_ms, latency.p99_ms, latency.actions_per_s)
        rows.append(
            (
                str(latency.batch),
                latency.kind,
                *(f"{number:.1f}" for number in numbers),
                *latency.reached.described(),
            )
        )
    columns = ("batch", "call", "best ms", "p50 ms", "p99 ms", "actions/s", "MFU", "of roofline")
    report.show(
        columns,
        rows,
        f"{recipe.model.name} on {recipe.cluster.device}; limits: {limits.described()}",
    )
    for name, ratio in ratios.items():
        same_share = f"the same actions in {100 * agreement[name]:.0f} %"
        console.print(
            f"{name}: plain / act = {ratio['p50']:.2f} (p50), {ratio['best']:.2f} (best); {same_share}"
        )
    if not ratios:
        console.print(f"{recipe.model.name} has no reference implementation to compare with")
    document: dict[str, Any] = {
        "latencies": [asdict(latency) for latency in measured],
        "plain_over_act": ratios,
        "same_actions": agreement,
    }
    weights = sum(parameter.numel() for parameter in policy.parameters())
    document |= {"limits": asdict(limits), "cuda_graphs": recipe.cluster.cuda_graphs}
    document |= {
        "model": recipe.model.name,
        "weights": weights,
        "threads": recipe.cluster.rollout_threads,
    }
    report.write(document)


def measure(
    policy: Policy,
    observation: Observation,
    temperature: float,
    cuda_graphs: bool,
    limits: Limits,
    updates: bool = True,
) -> tuple[list[Latency], float | None]:
    """Measure each kind of call, in turns so that other load affects all kinds alike.

    All actions are greedy. ``updates``: measure ``evaluate`` too, for which a large batch may need
    too much memory. Also returns the share of actions that equal those of the reference
    implementation (None if the policy has none).
    """
    inputs = prepared(policy, observation)
    with torch.no_grad():
        sample = policy.act(policy.encode(inputs), None, 0.0)
        plain = policy.reference_actions(inputs)
    batch, chunk = sample.actions.shape[:2]
    device = sample.actions.device
    zeros = torch.zeros(batch, dtype=torch.int64)
    eager, actor = (
        Actor(policy, Settings(0, 0.0, batch, graphs)) for graphs in (False, cuda_graphs)
    )

    def act() -> None:
        actor.act(inputs, Episodes(zeros, zeros, zeros), zeros)

    def act_eagerly() -> None:
        eager.act(inputs, Episodes(zeros, zeros, zeros), zeros)

    def plainly() -> None:
        with torch.no_grad():
            policy.reference_actions(inputs)

    def forward() -> None:
        with torch.no_grad():
            policy.evaluate(inputs, sample.latent, temperature)

    def backward() -> None:
        evaluation = policy.evaluate(inputs, sample.latent, temperature)
        (evaluation.log_prob.sum() + evaluation.value.sum()).backward()
        policy.zero_grad(set_to_none=True)

    kinds: dict[str, Callable[[], None]] = {"act": act}
    if device.type == "cuda" and cuda_graphs:
        kinds |= {"act without graphs": act_eagerly}
    if plain is not None:
        kinds |= {"plain": plainly}
    kinds |= {"evaluate": forward, "evaluate + backward": backward} if updates else {}
    seconds = time_interleaved(kinds, device, CALLS, WARMUP, SECONDS)
    latencies = []
    for kind, times in seconds.items():
        best, p50, p99 = (float(np.quantile(times, share)) for share in (0, 0.5, 0.99))
        done = work(act_eagerly if kind == "act" else kinds[kind], policy.parameters())
        reached = limits.reached(done, best)
        latencies.append(
            Latency(
                batch,
                kind,
                len(times),
                1e3 * best,
                1e3 * p50,
                1e3 * p99,
                batch * chunk / p50,
                reached,
            )
        )
    if plain is None:
        return latencies, None
    return latencies, torch.isclose(sample.actions, plain, rtol=0, atol=1e-4).double().mean().item()

"""Benchmark the speed and memory of an update on synthetic data, without a simulator."""

from __future__ import annotations

import torch
from omegaconf import DictConfig

from rlinf_vla.algorithms.on_policy import OnPolicy
from rlinf_vla.algorithms.sac import SAC, SACPolicy
from rlinf_vla.benchmarks import harness, update_on_policy, update_soft
from rlinf_vla.benchmarks.roofline import limits_of
from rlinf_vla.benchmarks.update_measurements import UpdateMeasurements
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import NO_ALGORITHM
from rlinf_vla.core.devices import threads
from rlinf_vla.runtime import builders, recipes
from rlinf_vla.training.lora import network_dtype


def run(config: DictConfig) -> None:
    """Measure the update of the recipe's algorithm, print it and write bench_update.json."""
    recipe = recipes.read(config)
    algorithm = None if recipe.algorithm.name == NO_ALGORITHM else builders.build_algorithm(recipe)
    if not isinstance(algorithm, OnPolicy | SAC):
        raise UserError(
            f"recipe={recipe.name}: bench update measures on-policy algorithms and sac, not {recipe.algorithm.name}"
        )
    policy = builders.build_policy(recipe)
    report = harness.Report(config, "bench_update")
    with (
        threads(recipe.cluster.update_threads),
        report.console.status("starting") as status,
    ):
        limits = limits_of(torch.device(recipe.cluster.torch_device), network_dtype(policy))
        if isinstance(policy, SACPolicy):
            report.directory.mkdir(parents=True, exist_ok=True)
            measurements = update_soft.measure(
                recipe, policy, limits, report.directory, status.update
            )
        else:
            measurements = update_on_policy.measure(recipe, policy, limits, status.update)
    _show(report, measurements, f"{recipe.model.name} on {recipe.cluster.device}")
    weights, trained = (
        [p.numel() for p in policy.parameters() if p.requires_grad or every]
        for every in (True, False)
    )
    document = measurements.document() | {
        "model": recipe.model.name,
        "weights": sum(weights),
        "trained": sum(trained),
    }
    report.write(document | {"threads": recipe.cluster.update_threads})


def _show(report: harness.Report, measurements: UpdateMeasurements, subject: str) -> None:
    console = report.console
    rates = measurements.rates.items()
    console.print(f"{subject}, {measurements.title}; limits: {measurements.limits.described()}")
    rows = []
    for name, rate in rates:
        reached = ("", "") if rate.reached is None else rate.reached.described()
        rows.append(
            (
                name,
                f"{rate.per_s:.1f} {rate.unit}/s",
                f"{1e3 * rate.best_s:.2f}",
                str(rate.calls),
                *reached,
            )
        )
    report.show(("", "rate", "best ms", "calls", "MFU", "of roofline"), rows)
    for name, memory in measurements.memory.items():
        parts = ("weights", "gradients", "optimizer", "activations", "data")
        breakdown = ", ".join(f"{part} {getattr(memory, part) / 1e6:.1f}" for part in parts)
        console.print(
            f"{name}: peak / expected memory {memory.ratio:.3f} = {memory.peak / 1e6:.1f} MB / ({breakdown})"
        )
    for name, ratio in measurements.ratios.items():
        console.print(f"{name}: {ratio:.2f}")
    for name, difference in measurements.differences.items():
        console.print(f"relative difference of the {name}: {difference:.1e}")

"""Benchmark the speed and memory of an update on synthetic data, without a simulator."""

from __future__ import annotations

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from rlinf_vla.algorithms.on_policy import OnPolicy
from rlinf_vla.algorithms.sac import SAC, SACPolicy
from rlinf_vla.benchmarks import update_on_policy, update_soft
from rlinf_vla.benchmarks.update_measurements import UpdateMeasurements
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import NO_ALGORITHM
from rlinf_vla.core.io import write_json
from rlinf_vla.runtime import builders, recipes, run_directory
from rlinf_vla.telemetry.environment import fingerprint


def run(config: DictConfig) -> None:
    """Measure the update of the recipe's algorithm, print it and write bench_update.json."""
    recipe = recipes.read(config)
    algorithm = None if recipe.algorithm.name == NO_ALGORITHM else builders.build_algorithm(recipe)
    if not isinstance(algorithm, OnPolicy | SAC):
        raise UserError(f"recipe={recipe.name}: bench update measures on-policy algorithms and sac, not {recipe.algorithm.name}")
    policy = builders.build_policy(recipe)
    directory = run_directory.for_evaluation(config, None)
    directory.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    with builders.threads(recipe.cluster.update_threads), console.status("starting") as status:
        if isinstance(policy, SACPolicy):
            found = update_soft.measure(recipe, policy, directory, status.update)
        else:
            found = update_on_policy.measure(recipe, policy, status.update)
    _show(console, found, f"{recipe.model.name} on {recipe.cluster.device}")
    weights, trained = ([p.numel() for p in policy.parameters() if p.requires_grad or every] for every in (True, False))
    document = found.document() | {"model": recipe.model.name, "weights": sum(weights), "trained": sum(trained)}
    write_json(directory / "bench_update.json", document | {"threads": recipe.cluster.update_threads, "environment": fingerprint()})
    console.print(f"numbers: {builders.relative(directory / 'bench_update.json')}")


def _show(console: Console, found: UpdateMeasurements, subject: str) -> None:
    console.print(f"{subject}, {found.title}")
    rates = Table("", "rate", "best ms", "calls")
    for name, rate in found.rates.items():
        rates.add_row(name, f"{rate.per_s:.1f} {rate.unit}/s", f"{1e3 * rate.best_s:.2f}", str(rate.calls))
    console.print(rates)
    for name, each in found.memory.items():
        parts = ("weights", "gradients", "optimizer", "activations", "data")
        said = ", ".join(f"{part} {getattr(each, part) / 1e6:.1f}" for part in parts)
        console.print(f"{name}: peak / expected memory {each.ratio:.3f} = {each.peak / 1e6:.1f} MB / ({said})")
    for name, ratio in found.ratios.items():
        console.print(f"{name}: {ratio:.2f}")
    for name, difference in found.differences.items():
        console.print(f"relative difference of the {name}: {difference:.1e}")

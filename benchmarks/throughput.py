"""Benchmark a recipe's iterations under several plans: speed, utilisation, bytes transferred."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass, replace
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import DictConfig

from rlinf_vla.algorithms.ppo import PPOConfig
from rlinf_vla.benchmarks import harness
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import ON_POLICY, Recipe
from rlinf_vla.features.planner import search as planning
from rlinf_vla.features.planner.choice import TIE_TOLERANCE, divides, least_rollout_seconds
from rlinf_vla.features.planner.plan import Plan
from rlinf_vla.features.planner.simulate import simulate
from rlinf_vla.runtime import builders, recipes
from rlinf_vla.runtime import open as runtimes
from rlinf_vla.runtime.on_policy import OnPolicyFlow
from rlinf_vla.telemetry.timeline import Timeline

ROUNDS = 3
"""Times that each plan is predicted and measured, in turn with the others."""
ITERATIONS = 2
"""Iterations of a plan in a round; the first is not counted."""


@dataclass(frozen=True)
class PlanTiming:
    """The median iteration under a plan, and the bytes that it transferred.

    ``busy``: share of its time in which each role had work, the mean over the role's workers.
    """

    seconds: float
    rollout_seconds: float
    update_seconds: float
    steps_per_s: float
    """Environment steps per second of the whole iteration."""
    samples_per_s: float
    """Policy calls trained on, counted once per epoch, per second of the update."""
    busy: dict[str, float]
    rollout_bytes: float
    weights_bytes: float


def run(config: DictConfig) -> None:
    """Predict and measure each plan, print a table and write bench_throughput.json.

    A machine's speed changes within minutes, so each round measures the profile anew, and the
    table has medians over the rounds; the ratio of prediction and time is that within a round.
    """
    recipe = recipes.read(config)
    if recipe.algorithm.family != ON_POLICY:
        raise UserError(
            f"bench throughput runs on-policy algorithms, not algorithm={recipe.algorithm.name}"
        )
    if isinstance(
        recipe.algorithm, PPOConfig
    ):  # iterations that warm up the critic are cheaper than predicted
        recipe = replace(recipe, algorithm=replace(recipe.algorithm, value_warmup=0))
    report = harness.Report(config, "bench_throughput")
    console = report.console
    candidates = plans(recipe)
    timings: dict[str, list[PlanTiming]] = {name: [] for name in candidates}
    predictions: dict[str, list[float]] = {name: [] for name in candidates}
    with console.status("profiling this machine") as status:
        for turn in range(ROUNDS):
            status.update(f"profiling this machine, round {turn + 1} of {ROUNDS}")
            problem, measured = planning.plan_problem(recipe)
            for name, plan in candidates.items():
                status.update(name)
                predictions[name].append(simulate(problem, plan).seconds)
                timings[name].append(_measure(planning.with_plan(recipe, plan), status.update))
                console.print(
                    f"{name}: {timings[name][-1].seconds:.1f} s, predicted {predictions[name][-1]:.1f} s"
                )
    medians = {
        name: sorted(runs, key=lambda timing: timing.seconds)[len(runs) // 2]
        for name, runs in timings.items()
    }
    predicted = {name: median(values) for name, values in predictions.items()}
    accuracy = {
        name: median(map(truediv, values, (timing.seconds for timing in timings[name])))
        for name, values in predictions.items()
    }
    columns = (
        "plan",
        "s",
        "predicted",
        "rollout s",
        "update s",
        "steps/s",
        "samples/s",
        "busy",
        "MB rollouts",
        "MB weights",
    )
    rows = []
    for name, timing in medians.items():
        busy = ", ".join(f"{role} {share:.0%}" for role, share in timing.busy.items())
        numbers = (
            timing.rollout_seconds,
            timing.update_seconds,
            timing.steps_per_s,
            timing.samples_per_s,
        )
        moved = (f"{timing.rollout_bytes / 1e6:.1f}", f"{timing.weights_bytes / 1e6:.1f}")
        share = f"{predicted[name]:.1f} ({accuracy[name]:.2f})"
        rows.append(
            (
                name,
                f"{timing.seconds:.1f}",
                share,
                *(f"{number:.1f}" for number in numbers),
                busy,
                *moved,
            )
        )
    report.show(columns, rows)
    serial = medians[SERIAL]
    ratios = {
        name: serial.seconds / timing.seconds for name, timing in medians.items() if name != SERIAL
    }
    for name, ratio in ratios.items():
        console.print(f"{name}: {ratio:.2f} times the iterations of {SERIAL} in the same time")
    bound = least_rollout_seconds(problem, candidates[SERIAL]) / least_rollout_seconds(
        problem, candidates[PIPELINED]
    )
    reached = serial.rollout_seconds / medians[PIPELINED].rollout_seconds
    summary = f"{bound:.2f} by the profile (the slower stage, or all cores), {reached / bound:.0%} of it reached"
    console.print(f"rollouts, {PIPELINED} / {SERIAL}: {reached:.2f}; the bound: {summary}")
    best = min(medians, key=lambda name: medians[name].seconds)
    least = min(predicted.values())
    chosen = next(
        name for name, seconds in predicted.items() if seconds <= (1 + TIE_TOLERANCE) * least
    )  # as the planner does
    regret = medians[chosen].seconds / medians[best].seconds
    console.print(
        f"fastest: {best}; predicted to be: {chosen}, which took {regret:.2f} times as long"
    )
    document: dict[str, Any] = {
        name: asdict(timing) | {"predicted_seconds": predicted[name], "accuracy": accuracy[name]}
        for name, timing in medians.items()
    }
    document |= {
        "ratios": ratios,
        "rollout_ratio": reached,
        "rollout_bound": bound,
        "regret": regret,
    }
    if measured is not None:
        measured.write(report.directory / "profile.json")
    report.write(document)


SERIAL, PIPELINED = "in process, serial", "in process, pipelined"


def plans(recipe: Recipe) -> dict[str, Plan]:
    """Return plans that compute the same update, with the recipe's own plan if it is another."""
    depth = max(2, recipe.rollout.pipeline_depth)
    rows = recipe.cluster.rows
    candidates = {
        SERIAL: Plan(pipeline_depth=1, micro_batch_size=rows),
        PIPELINED: Plan(pipeline_depth=depth, micro_batch_size=rows),
    }
    for workers in sorted({1, 2, recipe.cluster.rollout_workers}):
        for pipeline_depth in (1, depth):
            plan = Plan(
                "ray", rollout_workers=workers, pipeline_depth=pipeline_depth, micro_batch_size=rows
            )
            if divides(plan, recipe.env.num_envs, recipe.rollout.batch_size):
                candidates[
                    f"Ray, {workers} rollout worker{'s' * (workers > 1)}"
                    + ", pipelined" * (pipeline_depth > 1)
                ] = plan
    own = planning.plan_of(recipe)
    return candidates if own in candidates.values() else candidates | {"as the recipe says": own}


def _measure(recipe: Recipe, say: Any) -> PlanTiming:
    recipe = replace(recipe, iterations=ITERATIONS)
    algorithm = builders.build_algorithm(recipe)
    with (
        tempfile.TemporaryDirectory(prefix="rlinf_vla_bench_") as directory,
        runtimes.open_runtime(recipe, Path(directory), None, say) as runtime,
    ):
        flow = runtime.flow
        assert isinstance(flow, OnPolicyFlow)
        algorithm.check(runtime.env)
        for iteration in range(ITERATIONS):
            started = time.perf_counter()
            flow.begin(iteration)
            algorithm.iteration(flow)
            seconds = time.perf_counter() - started
        return _of(flow, recipe, seconds)


def _of(flow: OnPolicyFlow, recipe: Recipe, seconds: float) -> PlanTiming:
    metrics, config = flow.metrics, recipe.algorithm
    update = metrics.get("timing_s/update", 0.0)
    samples = metrics.get("actor/updates", 0.0) * config.minibatch_size
    return PlanTiming(
        seconds=seconds,
        rollout_seconds=metrics["timing_s/rollout"],
        update_seconds=update,
        steps_per_s=metrics["rollout/steps"] / seconds,
        samples_per_s=samples / update if update else 0.0,
        busy={role: share / seconds for role, share in busy(flow.timeline).items()},
        rollout_bytes=metrics.get("rollout/bytes", 0.0),
        weights_bytes=metrics.get("weights/bytes", 0.0)
        * (recipe.cluster.rollout_workers if recipe.cluster.runtime == "ray" else 0),
    )


def busy(timeline: Timeline) -> dict[str, float]:
    """Seconds of the current iteration in which each role had work, the mean over its tracks."""
    roles: dict[str, list[float]] = {}
    for track in sorted({span.track for span in timeline.spans()}):
        role = (
            "simulators"
            if "simulator" in track
            else "policy"
            if track.endswith("policy")
            else "trainer"
        )
        roles.setdefault(role, []).append(timeline.busy(track))
    return {role: sum(shares) / len(shares) for role, shares in roles.items()}

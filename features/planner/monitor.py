"""Compare a training run with its prediction, and change the plan if another one is faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

from rlinf_vla.config.cluster import AUTO
from rlinf_vla.config.recipe import ON_POLICY, Recipe
from rlinf_vla.features.planner.choice import choose
from rlinf_vla.features.planner.memory import MemoryModel
from rlinf_vla.features.planner.plan import Plan, Problem
from rlinf_vla.features.planner.prediction import Prediction
from rlinf_vla.features.planner.profile import Profile
from rlinf_vla.features.planner.search import (
    SHARDED,
    only_plan,
    plan_of,
    plan_problem,
    planned_problem,
    whole_run,
    with_plan,
)
from rlinf_vla.features.planner.simulate import simulate
from rlinf_vla.runtime.base import Restart
from rlinf_vla.telemetry.timeline import PREDICTED

ROLLOUT = ("act", "head", "encode", "value", "merge", "simulate", "reset", "features")
UPDATE = ("precompute", "update", "optimise", "reference")
REPLAN_THRESHOLD = 0.9
"""A run changes its plan if another one is predicted to take less than this share of its time."""


class Replanned(Restart):
    """The run continues under another plan, from the checkpoint that was written last."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(str(plan))
        self.plan = plan


class PlanMonitor:
    """Compare the iterations of a run under one plan with their prediction."""

    def __init__(
        self, recipe: Recipe, problem: Problem, prediction: Prediction, say: Callable[[str], None]
    ) -> None:
        self._recipe = recipe
        self._problem = problem
        self._prediction = prediction
        self._say = say
        self._begun = False
        self._measured: list[Mapping[str, float]] = []

    def watch(self, metrics: Mapping[str, float], iteration: int) -> dict[str, float]:
        """Store an iteration's metrics and return the prediction to log.

        Skips the first iteration under a plan (one-off work) and warm-up iterations of the critic.
        """
        if self._begun and iteration >= getattr(self._recipe.algorithm, "value_warmup", 0):
            self._measured.append(metrics)
        self._begun = True
        return {"plan/predicted_s": self._prediction.seconds}

    def summary_line(self) -> str | None:
        """Return a summary line for the user, or None if too little was measured."""
        if not self._measured:
            return None
        seconds = self._seconds("timing_s/iteration")
        predicted = self._prediction.seconds
        return f"an iteration took {seconds:.1f} s, {predicted:.1f} s were predicted (ratio {predicted / seconds:.2f})"

    def write(self, directory: Path) -> None:
        """Write the predicted timeline, which the report shows beside the recorded one."""
        self._prediction.timeline().write(directory / PREDICTED)

    def replan_if_due(self) -> None:
        """Plan again after ``replan_after`` iterations. Raises Replanned for a faster plan."""
        after = self._recipe.cluster.replan_after
        if not after or len(self._measured) != after:
            return
        rollout, update = self._seconds("timing_s/rollout"), self._seconds("timing_s/update")
        profiles = {
            device: corrected(profile, self._prediction, rollout, update)
            for device, profile in self._problem.profiles.items()
        }
        self._problem = replace(self._problem, profiles=profiles)
        self._prediction = simulate(self._problem, self._prediction.plan)
        best = choose(self._problem).best
        self._say(
            f"re-planned after {after} iterations: now {self._prediction.seconds:.1f} s; {best.seconds:.1f} s with {best.plan}"
        )
        if best.seconds < REPLAN_THRESHOLD * self._prediction.seconds:
            raise Replanned(best.plan)

    def under(self, plan: Plan) -> tuple[Recipe, PlanMonitor]:
        """Return recipe and monitor for the rest of the run under ``plan``; it plans no more."""
        recipe = with_plan(self._recipe, plan)
        once = replace(recipe, cluster=replace(recipe.cluster, replan_after=0))
        return recipe, PlanMonitor(once, self._problem, simulate(self._problem, plan), self._say)

    def _seconds(self, name: str) -> float:
        return median(metrics.get(name, 0.0) for metrics in self._measured)


def planned(
    recipe: Recipe, say: Callable[[str], None], model: MemoryModel | None = None
) -> tuple[Recipe, PlanMonitor | None]:
    """Return the recipe under its plan, and a monitor if a plan was predicted.

    ``model``: the recipe's, if it is there already. Raises UserError.
    """
    if recipe.algorithm.family != ON_POLICY:
        say(f"the plan of algorithm={recipe.algorithm.name}: {(plan := only_plan(recipe))}")
        return with_plan(recipe, plan), None
    if recipe.profile is None and not recipe.cluster.nodes:
        say("measuring the cost of operations on this machine")
    if recipe.cluster.plan == AUTO:
        unsharded = recipe.cluster.trainer_sharding
        recipe, problem, choice, _ = planned_problem(recipe, model)
        if recipe.cluster.trainer_sharding != unsharded:
            say(SHARDED)
        say(choice.explain())
        prediction = choice.best
        recipe = with_plan(recipe, prediction.plan)
    else:
        problem, _ = plan_problem(recipe, model)
        prediction = simulate(problem, plan_of(recipe))
    if problem.assumed:
        for profile in problem.profiles.values():
            say(f"costs: {profile.note}")
    say(f"{problem.kind}: {prediction.seconds:.1f} s per iteration; {prediction.bottleneck}")
    say(whole_run(recipe, problem, prediction))
    return recipe, PlanMonitor(recipe, problem, prediction, say)


def phase_seconds(prediction: Prediction, names: tuple[str, ...]) -> float:
    """Seconds from the start of the first of these tasks in an iteration to the end of the last."""
    spans = [span for span in prediction.spans if span.name in names]
    return max(span.end for span in spans) - min(span.start for span in spans) if spans else 0.0


def corrected(
    profile: Profile, prediction: Prediction, rollout_s: float, update_s: float
) -> Profile:
    """Scale the costs of each phase by its measured over its predicted seconds."""
    operations = dict(profile.operations)
    for names, measured in ((ROLLOUT, rollout_s), (UPDATE, update_s)):
        predicted = phase_seconds(prediction, names)
        if predicted > 0 and measured > 0:
            operations |= {
                name: cost.times(measured / predicted)
                for name, cost in profile.operations.items()
                if name in names
            }
    return replace(
        profile,
        operations=operations,
        note=f"{profile.note}, corrected by the run's own iterations",
    )

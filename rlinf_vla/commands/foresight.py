"""A training run beside its plan: predicted and measured seconds, and another plan where the measurements ask for one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median

from rlinf_vla.commands.plan import Outlook, following, outlook, plan_of
from rlinf_vla.flow.planning.plan import Plan
from rlinf_vla.flow.planning.prediction import Prediction
from rlinf_vla.flow.planning.replanning import WORTH, corrected
from rlinf_vla.recipe import Recipe


class Replanned(Exception):
    """From the checkpoint that was just written the run goes on under another plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(str(plan))
        self.plan = plan


class Foresight:
    def __init__(self, recipe: Recipe, found: Outlook, prediction: Prediction, say: Callable[[str], None]) -> None:
        self._recipe, self._found, self._prediction, self._say = recipe, found, prediction, say
        self._begun = False
        self._measured: list[Mapping[str, float]] = []

    def watch(self, metrics: Mapping[str, float], iteration: int) -> dict[str, float]:
        """The first one under a plan, in which much is done for the first time, does not count; nor one that warms the critic up only."""
        if self._begun and iteration >= getattr(self._recipe.algorithm, "value_warmup", 0):
            self._measured.append(metrics)
        self._begun = True
        return {"plan/predicted_s": self._prediction.seconds}

    def ends_with(self) -> str | None:
        """A line for people; None: too little was measured."""
        if not self._measured:
            return None
        seconds, predicted = self._seconds("timing_s/iteration"), self._prediction.seconds
        return f"an iteration took {seconds:.1f} s, {predicted:.1f} s were predicted ({predicted / seconds:.2f} of it)"

    def look_again(self) -> None:
        """Once enough iterations are measured. Raises Replanned where another plan is predicted to be clearly faster."""
        after = self._recipe.cluster.replan_after
        if not after or len(self._measured) != after:
            return
        rollout, update = self._seconds("timing_s/rollout"), self._seconds("timing_s/update")
        profiles = {device: corrected(each, self._prediction, rollout, update) for device, each in self._found.profiles.items()}
        self._found = replace(self._found, profiles=profiles)
        self._prediction = self._found.predict(self._prediction.plan)
        best = self._found.choose().best
        self._say(f"planned again from {after} iterations: now {self._prediction.seconds:.1f} s; {best.seconds:.1f} s with {best.plan}")
        if best.seconds < WORTH * self._prediction.seconds:
            raise Replanned(best.plan)

    def under(self, plan: Plan) -> Foresight:
        """The same for the rest of the run, which carries out ``plan``."""
        recipe = following(self._recipe, plan)
        return Foresight(
            replace(recipe, cluster=replace(recipe.cluster, replan_after=0)), self._found, self._found.predict(plan), self._say
        )

    def _seconds(self, name: str) -> float:
        return median(each.get(name, 0.0) for each in self._measured)


def foreseen(recipe: Recipe, say: Callable[[str], None]) -> tuple[Recipe, Foresight | None]:
    """The recipe under the plan that is to be carried out, and what is expected of it; None where nobody asked."""
    if recipe.cluster.plan == "given" and recipe.profile is None:
        return recipe, None
    if recipe.profile is None:
        say("measuring what operations cost on this machine")
    found = outlook(recipe)
    if recipe.cluster.plan == "auto":
        choice = found.choose()
        say(choice.explain())
        prediction = choice.best
        recipe = following(recipe, prediction.plan)
    else:
        prediction = found.predict(plan_of(recipe))
    say(f"predicted: {prediction.seconds:.1f} s per iteration; {prediction.bottleneck}")
    return recipe, Foresight(recipe, found, prediction, say)

"""Recipe nodes ``evaluation`` and ``sweep``: what is played to measure a policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from rlinf_vla.ranges import Count, CountOrZero, Name, OneOf, Size

MODES = ("sampled", "greedy")
NO_ALGORITHM = "none"
"""The algorithm of a recipe in which nothing learns: it is for ``rlinf-vla eval``."""


@dataclass
class EvaluationConfig:
    modes: list[Annotated[str, OneOf(*MODES)]] = field(default_factory=lambda: list(MODES))
    every: CountOrZero = 0
    """Iterations between evaluations in a run; 0: before and after only."""
    before_and_after: bool = True
    filmed: CountOrZero = 1
    """Episodes of each evaluation that become videos; in a sweep, of each policy and task, failures first."""


@dataclass
class SweepConfig:
    """Of ``rlinf-vla eval``: policies x suites x tasks x seeds (docs/evaluation.md)."""

    policies: list[str] = field(default_factory=list)
    """Each is ``start`` (model.checkpoint as it is), a checkpoint of a run, a model directory, ``expert`` (the simulator's own) or
    ``random``; all play the same episodes. ``checkpoint`` plays, too, and so does the model of a recipe with ``algorithm=none``.
    Empty: no sweep, ``checkpoint`` is evaluated into its run."""
    block: Count = 10
    """Episodes of a task that are played and kept together; a sweep that is killed loses at most the blocks under way."""
    parallel: Size = 1
    """Processes that play blocks; 1: this one. Each has environments of its own."""


@dataclass
class NoAlgorithmConfig:
    """``algorithm=none``: the recipe is for evaluation, nothing learns."""

    name: Name = NO_ALGORITHM

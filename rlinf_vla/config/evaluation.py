"""Define the recipe nodes ``evaluation`` and ``sweep``: episodes that measure a policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from rlinf_vla.config.ranges import Count, CountOrZero, OneOf, Size

MODES = ("sampled", "greedy")


@dataclass
class EvaluationConfig:
    modes: list[Annotated[str, OneOf(*MODES)]] = field(default_factory=lambda: list(MODES))
    """sampled: act at rollout.temperature; greedy: act at temperature 0."""
    every: CountOrZero = 0
    """Iterations between evaluations during training; 0: none during training."""
    before_and_after: bool = True
    """Evaluate before the first and after the last iteration."""
    filmed: CountOrZero = 1
    """Episodes per evaluation saved as video; in a sweep per policy and task, failures first."""


@dataclass
class SweepConfig:
    """Sweep of ``rlinf-vla eval``: policies x suites x tasks x seeds (docs/evaluation.md)."""

    policies: list[str] = field(default_factory=list)
    """Policies under evaluation, all on the same episodes: ``start`` (model.checkpoint unchanged),
    a checkpoint of a run, a model directory, ``expert`` (the simulator's script) or ``random``.
    ``checkpoint`` is added, and the model of a recipe with ``algorithm=none``. Empty: no sweep;
    ``checkpoint`` alone is evaluated, into its run."""
    block: Count = 10
    """Episodes of a task that run and are saved together; a kill loses only unfinished blocks."""
    parallel: Size = 1
    """Processes that run blocks, each with its own environments; 1: this process."""

"""Recipe nodes ``evaluation`` and ``sweep``: what is played to measure a policy."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EvaluationConfig:
    modes: list[str] = field(default_factory=lambda: ["sampled", "greedy"])
    every: int = 0
    """Iterations between evaluations in a run; 0: before and after only."""
    before_and_after: bool = True
    filmed: int = 1
    """Episodes of each evaluation that become videos; in a sweep, of each policy and task, failures first."""


@dataclass
class SweepConfig:
    """Of ``rlinf-vla eval``: policies x suites x tasks x seeds (docs/evaluation.md)."""

    policies: list[str] = field(default_factory=list)
    """Each is ``start`` (model.checkpoint as it is), a checkpoint of a run, a model directory, ``expert`` (the simulator's own) or
    ``random``; all play the same episodes. ``checkpoint`` plays, too, and so does the model of a recipe with ``algorithm=none``.
    Empty: no sweep, ``checkpoint`` is evaluated into its run."""
    block: int = 10
    """Episodes of a task that are played and kept together; a sweep that is killed loses at most the blocks under way."""
    parallel: int = 1
    """Processes that play blocks; 1: this one. Each has environments of its own."""


@dataclass
class NoAlgorithmConfig:
    """``algorithm=none``: the recipe is for evaluation, nothing learns."""

    name: str = "none"

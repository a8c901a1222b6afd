"""A limit on an episode's mean cost: a Lagrangian penalty, whose multiplier adapts to the cost.

Reward constrained policy optimisation (Tessler et al. 2018, arXiv 1805.11074, eq. 10) learns from
``reward - multiplier * cost``. The multiplier follows projected dual ascent on (mean episode cost -
limit), once per iteration, as in PPO-Lagrangian (Ray et al. 2019).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlinf_vla.algorithms.base import Algorithm
from rlinf_vla.config.ranges import NonNegative
from rlinf_vla.config.recipe import AlgorithmConfig
from rlinf_vla.core.transitions import COST, REWARD
from rlinf_vla.core.types import Rollouts, Trajectory

if TYPE_CHECKING:
    from rlinf_vla.core.transitions import Transitions

EPISODE_COST, MULTIPLIER = "rollout/cost_per_episode", "cost_multiplier"
"""The metric that the multiplier follows, and its own name in metrics and checkpoints."""


@dataclass
class CostConfig(AlgorithmConfig):
    """Recipe keys of an algorithm that can limit the cost of an episode."""

    cost_limit: NonNegative | None = None
    """Limit of the mean cost per episode, the number of changes by safety limits; null: none."""
    cost_rate: NonNegative = 0.01
    """Change of the multiplier per iteration and unit of cost above cost_limit."""
    cost_initial: NonNegative = 0.0
    """Initial multiplier: the penalty, in units of reward, for each unit of cost."""


class CostLimited(Algorithm):
    """Base class of algorithms with a cost limit."""

    multiplier: float
    """Penalty for each unit of cost; 0 without a limit."""

    def __init__(self, config: Any, temperature: float = 1.0, iterations: int = 0) -> None:
        super().__init__(config, temperature, iterations)
        self.restore({})

    def state(self) -> dict[str, Any]:
        return {} if self.config.cost_limit is None else {MULTIPLIER: self.multiplier}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.multiplier = (
            0.0
            if self.config.cost_limit is None
            else float(state.get(MULTIPLIER, self.config.cost_initial))
        )

    def adapt(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take the dual step, unless no episode ended; return the multiplier as a metric."""
        limit = self.config.cost_limit
        cost = metrics.get(EPISODE_COST)
        if limit is None:
            return {}
        if cost is not None:
            self.multiplier = max(0.0, self.multiplier + self.config.cost_rate * (cost - limit))
        return {f"actor/{MULTIPLIER}": self.multiplier}

    def charged(self, batch: Transitions) -> Transitions:
        """Return a replay batch with the penalty subtracted from the reward."""
        if not self.multiplier:
            return batch
        return replace(
            batch, now=batch.now | {REWARD: batch.now[REWARD] - self.multiplier * batch.now[COST]}
        )


@dataclass(frozen=True)
class Charged:
    """Rollouts with the penalty subtracted from the reward, shard by shard."""

    rollouts: Rollouts
    multiplier: float

    def __iter__(self) -> Iterator[Trajectory]:
        for shard in self.rollouts:
            assert shard.cost is not None, "config/checks.py refuses a cost limit without a cost"
            yield replace(shard, reward=shard.reward - self.multiplier * shard.cost)

"""Group relative policy optimisation (GRPO, Shao et al. 2024, arXiv 2402.03300) and relatives.

An episode's advantage is relative to the returns of other attempts at the same episode. Other
settings give DAPO (arXiv 2503.14476), Dr. GRPO (2503.20783), RLOO (2402.14740) or REINFORCE++
(2501.03262): see ``recipes/algorithm/``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor

from rlinf_vla.algorithms.advantages import (
    BASELINES,
    SCALES,
    all_equal,
    count_of,
    episode_returns,
    group_statistics,
    relative_advantages,
)
from rlinf_vla.algorithms.on_policy import AGGREGATIONS, Batch, Flow, OnPolicy, OnPolicyConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import Count, Interval, Name, OneOf, Probability, Range, Size
from rlinf_vla.core.types import Rollouts, Trajectory


@dataclass
class GRPOConfig(OnPolicyConfig):
    """Recipe node ``algorithm``."""

    name: Name = "grpo"
    episodes: Count = 64
    """Episodes per iteration; a multiple of group_size."""
    group_size: Size = 8
    """Attempts at the same episode: same initial state, different noise."""
    baseline: Annotated[str, OneOf(*BASELINES)] = "group_mean"
    """Baseline of a return: group_mean, leave_one_out (mean of the group's others), batch_mean."""
    scale: Annotated[str, OneOf(*SCALES)] = "group_std"
    """Divisor of the advantages: group_std, batch_std or none."""
    success_range: Annotated[list[Probability], Interval()] | None = None
    """Train only on groups with a success rate in this interval; null: no such limit."""
    uninformative: Annotated[str, OneOf("dropped", "counted")] = "dropped"
    """Groups of equal returns, and those outside success_range: ``dropped`` from the update, or
    ``counted`` in its denominators, with an advantage of 0, as in RLinf."""
    resample: Annotated[int, Range(0, 1000)] = 0
    """Replace uninformative groups by new ones up to this many times per iteration."""
    groups_per_step: Count | None = None
    """Groups per optimiser step, in order; needs epochs=1. null: shuffled minibatches.

    A step can start as soon as its groups are complete, while others are still being collected.
    """
    aggregation: Annotated[str, OneOf(*AGGREGATIONS)] = "trajectory_mean"
    gamma: Probability = 1.0


class GRPO(OnPolicy):
    """The GRPO algorithm and its relatives, as configured."""

    Config = GRPOConfig
    config: GRPOConfig

    def __init__(self, config: GRPOConfig, temperature: float = 1.0, iterations: int = 0) -> None:
        super().__init__(config, temperature, iterations)
        size, episodes = config.group_size, config.episodes
        if episodes % size:
            near = max(1, round(episodes / size)) * size
            raise UserError(
                f"algorithm.episodes={episodes} is not a multiple of algorithm.group_size={size}: use {near}"
            )
        if (config.baseline, config.scale) == ("batch_mean", "group_std"):
            raise UserError(
                "algorithm.baseline=batch_mean, scale=group_std: a group of equal returns has standard deviation 0; use scale=batch_std"
            )
        if size == 1 and (config.baseline, config.scale) not in (
            ("batch_mean", "batch_std"),
            ("batch_mean", "none"),
        ):
            raise UserError(
                "algorithm.group_size=1 has no group statistics: use algorithm.baseline=batch_mean and scale=batch_std"
            )
        if config.groups_per_step is not None and config.epochs != 1:
            raise UserError(
                f"algorithm.groups_per_step={config.groups_per_step} uses each group once: set algorithm.epochs=1"
            )
        if config.groups_per_step is not None and (
            config.baseline == "batch_mean" or config.scale == "batch_std"
        ):
            raise UserError(
                f"algorithm.baseline={config.baseline}, scale={config.scale} need all episodes of an iteration: set "
                "algorithm.groups_per_step=null"
            )
        if config.uninformative == "counted" and config.resample:
            raise UserError(
                "algorithm.resample replaces the groups that algorithm.uninformative=counted keeps: set resample=0"
            )
        if config.staleness and config.resample:
            raise UserError(
                "algorithm.resample needs an iteration's rollouts, which algorithm.staleness collects earlier: set one of them to 0"
            )

    @property
    def keeps_proximal(self) -> bool:
        return self.config.decoupled and self.config.groups_per_step is not None

    def iteration(self, flow: Flow) -> None:
        waiting: list[Trajectory] = []
        group_count = self.config.episodes // self.config.group_size
        drawn = informative = 0
        far_enough = False
        for draw in range(1 + self.config.resample):
            rollouts = flow.collect_groups(group_count - informative, self.config.group_size, draw)
            for group in groups_of(self.prepared(flow, rollouts)):
                drawn += 1
                teaches = bool(self.informative(group).any())
                if not teaches and self.config.uninformative == "dropped":
                    continue
                informative += teaches
                waiting.append(group)
                if len(waiting) == self.config.groups_per_step:
                    far_enough = far_enough or self._learn(flow, waiting)
                    waiting = []
            if informative == group_count:
                break
        flow.log({"grpo/groups": float(drawn), "grpo/frac_informative": informative / drawn})
        if waiting and not far_enough:
            self._learn(flow, waiting)
        flow.publish()

    def _learn(self, flow: Flow, groups: list[Trajectory]) -> bool:
        calls = Trajectory.cat(groups, dim=0)
        return flow.update(self.weighted(calls, self.advantages(calls)), self)

    def minibatch_size(self, batch: Batch) -> int:
        return self.config.minibatch_size if self.config.groups_per_step is None else len(batch)

    def informative(self, rollouts: Trajectory) -> Tensor:
        """Return which groups an update learns from, bool ``[G]``.

        Unless the baseline is that of the batch, a group of equal returns is uninformative.
        """
        group = rollouts.group_of_episode()
        if self.config.baseline == "batch_mean":
            teaches = torch.ones(count_of(group), dtype=torch.bool, device=group.device)
        else:
            teaches = ~all_equal(self._scores(rollouts), group)
        if self.config.success_range is not None:
            low, high = self.config.success_range
            rate = group_statistics(rollouts.episode_success().float(), group)[1]
            teaches &= (low <= rate) & (rate <= high)
        return teaches

    def advantages(self, calls: Trajectory) -> Tensor:
        """Return the advantage ``[N]`` of each call, which is that of its episode."""
        config = self.config
        group = calls.group_of_episode()
        per_episode = relative_advantages(self._scores(calls), group, config.baseline, config.scale)
        if config.uninformative == "counted":
            per_episode = torch.where(self.informative(calls)[group], per_episode, 0)
        return per_episode.to(calls.reward.dtype)[calls.episode_ids()]

    def _scores(self, calls: Trajectory) -> Tensor:
        return episode_returns(calls, self.config.gamma, self.config.gamma_unit)


def groups_of(rollouts: Rollouts) -> Iterator[Trajectory]:
    """Yield the calls of each group; a shard holds whole groups, the calls of each in one piece."""
    for shard in rollouts:
        key = torch.stack([shard.task_id, shard.seed])
        starts = (key[:, 1:] != key[:, :-1]).any(0).nonzero()[:, 0] + 1
        edges = [0, *starts.tolist(), len(shard)]
        for start, end in pairwise(edges):
            yield shard[start:end]

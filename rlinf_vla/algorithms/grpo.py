"""Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300): attempts at one episode are each other's critic.

With other settings it is DAPO (arXiv 2503.14476), Dr. GRPO (2503.20783), RLOO (2402.14740) or REINFORCE++ (2501.03262): see ``PRESETS``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_vla.algorithms.advantages import BASELINES, SCALES, count_of, episode_returns, group_statistics, relative_advantages
from rlinf_vla.algorithms.on_policy import Flow, OnPolicy, OnPolicyConfig
from rlinf_vla.types import Trajectory, UserError, require_one_of


@dataclass
class GRPOConfig(OnPolicyConfig):
    """Recipe node ``algorithm``."""

    name: str = "grpo"
    episodes: int = 64
    """Per iteration; a multiple of group_size."""
    group_size: int = 8
    """Attempts at the same episode: the same start, other noise."""
    baseline: str = "group_mean"
    """What an episode's return is compared with: group_mean, leave_one_out (the mean of the group's others) or batch_mean."""
    scale: str = "group_std"
    """What the difference is divided by: group_std, batch_std or none."""
    success_range: list[float] | None = None
    """Learn from groups only whose success rate lies within; null: from all whose returns differ."""
    resample: int = 0
    """Draw new groups for those that taught nothing, up to so many times per iteration."""
    aggregation: str = "trajectory_mean"
    gamma: float = 1.0


PRESETS = {
    "dapo": GRPOConfig(clip_high=0.28, aggregation="token_mean", granularity="token", resample=3),
    "dr_grpo": GRPOConfig(scale="none", aggregation="token_mean"),
    "rloo": GRPOConfig(baseline="leave_one_out", scale="none"),
    "reinforce_pp": GRPOConfig(group_size=1, baseline="batch_mean", scale="batch_std", aggregation="token_mean", kl_coef=0.01),
}


class GRPO(OnPolicy):
    config: GRPOConfig

    def __init__(self, config: GRPOConfig, temperature: float) -> None:
        super().__init__(config, temperature)
        size, episodes = config.group_size, config.episodes
        for key, known in (("baseline", BASELINES), ("scale", SCALES)):
            require_one_of(f"algorithm.{key}", getattr(config, key), known)
        if episodes < 1 or size < 1 or episodes % size:
            near = max(1, round(episodes / max(size, 1))) * max(size, 1)
            raise UserError(f"algorithm.episodes={episodes} is not a multiple of algorithm.group_size={size}: use {near}")
        if size == 1 and (config.baseline, config.scale) not in (("batch_mean", "batch_std"), ("batch_mean", "none")):
            raise UserError("algorithm.group_size=1 leaves nothing to compare with: use algorithm.baseline=batch_mean and scale=batch_std")

    def iteration(self, flow: Flow) -> None:
        kept: list[Trajectory] = []
        wanted = self.config.episodes // self.config.group_size
        drawn = informative = 0
        for draw in range(1 + self.config.resample):
            episodes = flow.training_episodes(wanted - informative, draw)
            rollouts = flow.collect_episodes(episodes.repeat(self.config.group_size))
            teaches = self.informative(rollouts)
            kept.append(rollouts[teaches[rollouts.group_ids()]])
            drawn, informative = drawn + len(teaches), informative + int(teaches.sum())
            if informative == wanted:
                break
        flow.log({"grpo/groups": float(drawn), "grpo/frac_informative": informative / drawn})
        if informative:
            calls = Trajectory.cat(kept, dim=0)
            flow.update(self.weighted(calls, self.advantages(calls)), self)
        flow.publish()

    def informative(self, rollouts: Trajectory) -> Tensor:
        """bool ``[G]``: which groups an update can learn from. The others are not in its denominators either."""
        group = rollouts.group_of_episode()
        if self.config.baseline == "batch_mean":
            teaches = torch.ones(count_of(group), dtype=torch.bool, device=group.device)
        else:
            teaches = group_statistics(self._scores(rollouts), group)[2] > 0
        if self.config.success_range is not None:
            low, high = self.config.success_range
            rate = group_statistics(rollouts.episode_success().float(), group)[1]
            teaches &= (low <= rate) & (rate <= high)
        return teaches

    def advantages(self, calls: Trajectory) -> Tensor:
        """``[N]``: of the episode that each call belongs to."""
        config = self.config
        per_episode = relative_advantages(self._scores(calls), calls.group_of_episode(), config.baseline, config.scale)
        return per_episode[calls.episode_ids()]

    def _scores(self, calls: Trajectory) -> Tensor:
        return episode_returns(calls, self.config.gamma, self.config.gamma_unit)

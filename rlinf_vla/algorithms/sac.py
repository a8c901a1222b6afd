"""Soft actor-critic (Haarnoja et al. 2018), an ensemble of critics (REDQ, Chen et al. 2021), demonstrations (RLPD, Ball et al. 2023).

In the space of a frozen flow policy's noise it is DSRL (Wagenmaker et al. 2025, arXiv 2506.15799).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Protocol

import torch
from torch import Tensor

from rlinf_vla.algorithms.advantages import GAMMA_UNITS
from rlinf_vla.protocols import EnvSpec
from rlinf_vla.ranges import Count, CountOrZero, Label, LearningRate, Name, NonNegative, OneOf, Positive, Probability, Range, Size
from rlinf_vla.types import Episodes, UserError

AGGREGATES = ("mean", "min")
ACTION, REWARD, DISCOUNT, ACTED = "action", "reward", "discount", "acted"
"""What a record says beside the policy's inputs; see ``rollout/transitions.py``."""


@dataclass
class SACConfig:
    """Recipe node ``algorithm``."""

    name: Name = "sac"
    episodes: Count = 16
    """Played per iteration, before its updates."""
    updates_per_step: Annotated[float, Range(0, 1000)] = 0.5
    """Updates of the critics per control step that was played."""
    batch_size: Size = 128
    replay_capacity: Count = 100_000
    """Observations that are kept."""
    demonstrations: CountOrZero = 0
    """Episodes of the scripted expert, played before the first iteration; they stay for the whole run."""
    dataset: str | None = None
    """A LeRobotDataset (v3.0) with rewards whose episodes are the demonstrations, in place of a scripted expert's."""
    dataset_cameras: list[Label] = field(default_factory=list)
    """What it calls the policy's cameras, where it calls them otherwise: [base:front]."""
    demonstration_share: Annotated[float, Range(0, 1, below=True)] = 0.5
    """Of every batch, where there are demonstrations."""
    sft_coef: NonNegative = 0.0
    """Of the imitation loss on the demonstrations, beside the actor's own (co-training)."""
    gamma: Probability = 0.97
    """Discount per gamma_unit."""
    gamma_unit: Annotated[str, OneOf(*GAMMA_UNITS)] = "step"
    """step: per control step, whatever the chunk; chunk: per policy call, rewards within a chunk alike (as RLinf's chunk_level)."""
    frozen_backbone: bool = False
    """Only actor and critics learn; then features are computed once, and remembered instead of images."""
    noise_bound: Positive | None = None
    """The actor chooses the noise that a frozen flow policy begins from, each dimension up to this magnitude (DSRL); null: it chooses
    actions."""
    critics: Annotated[int, Range(1, 1000)] = 10
    critic_subset: Annotated[int, Range(1, 1000)] = 2
    """Of the critics, drawn for each target, which is the least of them."""
    actor_aggregate: Annotated[str, OneOf(*AGGREGATES)] = "mean"
    """Of the critics, what the actor climbs: mean or min."""
    actor_every: Count = 2
    """Updates of the critics per update of the actor and of alpha."""
    hidden: Size = 256
    target_rate: Annotated[float, Range(0, 1, above=True)] = 0.005
    """Share of the critics that their targets take on per update."""
    initial_alpha: Annotated[float, Range(1e-9, 1e6)] = 0.1
    target_entropy: Annotated[float, Range(-1e6, 1e6)] | None = None
    """Nats per choice; null: minus the number of dimensions that the actor chooses."""
    backup_entropy: bool = False
    """The entropy is part of the targets."""
    shift: Annotated[int, Range(0, 1024)] = 4
    """Images are moved by up to so many pixels in each direction (DrQ, Kostrikov et al. 2021); 0: not."""
    learning_rate: LearningRate = 3e-4
    value_learning_rate: LearningRate = 3e-4
    max_grad_norm: Positive = 10.0


class Flow(Protocol):
    """The operations that SAC's macro flow is made of."""

    iteration: int

    def demonstrate(self, episodes: int) -> None:
        """The dataset's, or so many of the expert's, episodes into the store of demonstrations, unless they are there."""

    def training_episodes(self, count: int, draw: int) -> Episodes: ...
    def collect_transitions(self, episodes: Episodes) -> int:
        """Play them and remember what happened; returns the number of control steps."""

    def improve(self, updates: int) -> None:
        """So many updates on batches of what is remembered."""

    def publish(self) -> None: ...
    def log(self, metrics: dict[str, float]) -> None: ...


class SAC:
    def __init__(self, config: SACConfig, temperature: float) -> None:
        self.config, self.temperature = config, temperature
        if config.critic_subset > config.critics:
            raise UserError(f"algorithm.critic_subset={config.critic_subset} is more than algorithm.critics={config.critics}: lower it")
        if config.demonstrations and config.dataset is not None:
            raise UserError("algorithm.dataset brings its own episodes: leave algorithm.demonstrations=0, or the dataset out")
        if self._shown and not config.demonstration_share:
            raise UserError("algorithm.demonstration_share=0 leaves demonstrations without effect: raise it, or leave them out")
        if config.sft_coef and not self._shown:
            raise UserError(
                f"algorithm.sft_coef={config.sft_coef} imitates demonstrations: set algorithm.demonstrations or algorithm.dataset"
            )
        if config.noise_bound is not None and not config.frozen_backbone:
            raise UserError("algorithm.noise_bound steers a policy that stays as it is: set algorithm.frozen_backbone=true")
        if config.noise_bound is not None and self._shown:
            raise UserError("demonstrations are actions, and algorithm.noise_bound chooses noise: leave one of them out")

    @property
    def _shown(self) -> bool:
        return self.config.demonstrations > 0 or self.config.dataset is not None

    def check(self, env: EnvSpec) -> None:
        """Nothing of the environment could be wrong."""

    def iteration(self, flow: Flow) -> None:
        if self._shown:
            flow.demonstrate(self.config.demonstrations)
        steps = flow.collect_transitions(flow.training_episodes(self.config.episodes, 0))
        flow.improve(round(steps * self.config.updates_per_step))
        flow.publish()


def soft_target(
    reward: Tensor, discount: Tensor, next_values: Tensor, next_log_prob: Tensor, alpha: Tensor, backup_entropy: bool
) -> Tensor:
    """``r + discount (min_j Q_j(s', a') - alpha log pi(a'|s'))`` ``[B]``.

    ``reward`` and ``discount`` are a chunk's (``gamma**n``, and 0 where the episode terminated); ``next_values`` ``[M, B]`` of the critics
    drawn (REDQ, eq. 3).
    """
    value = next_values.min(dim=0).values
    if backup_entropy:
        value = value - alpha * next_log_prob
    return reward + discount * torch.where(discount > 0, value, 0)


def critic_loss(values: Tensor, target: Tensor) -> Tensor:
    """Mean over the batch, sum over the ``K`` critics, which share no weights: ``[K, B]``, ``[B]``."""
    return 0.5 * ((values - target) ** 2).mean(dim=1).sum()


def actor_loss(values: Tensor, log_prob: Tensor, alpha: Tensor, aggregate: str) -> Tensor:
    """``mean(alpha log pi - Q)``; ``values`` ``[K, B]``."""
    value = values.mean(dim=0) if aggregate == "mean" else values.min(dim=0).values
    return (alpha * log_prob - value).mean()


def alpha_loss(log_alpha: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    """Raises alpha while the entropy is below its target (Haarnoja et al. 2018b, eq. 18)."""
    return -(log_alpha.exp() * (log_prob + target_entropy).mean())

"""Soft actor-critic (SAC) with an ensemble of critics and, optionally, demonstrations.

SAC: Haarnoja et al. 2018. Ensemble: REDQ, Chen et al. 2021. Demonstrations: RLPD, Ball et al. 2023.
In the noise space of a frozen flow policy it is DSRL (Wagenmaker et al. 2025, arXiv 2506.15799).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Protocol

import torch
from torch import Tensor

from rlinf_vla.algorithms.advantages import GAMMA_UNITS
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import Count, CountOrZero, Label, LearningRate, Name, NonNegative, OneOf, Positive, Probability, Range, Size
from rlinf_vla.core.protocols import EnvSpec
from rlinf_vla.core.types import Episodes

AGGREGATES = ("mean", "min")
ACTION, REWARD, DISCOUNT, ACTED = "action", "reward", "discount", "acted"
"""Fields of a replay record beside the policy's inputs; see ``rollout/transitions.py``."""


@dataclass
class SACConfig:
    """Recipe node ``algorithm``."""

    name: Name = "sac"
    episodes: Count = 16
    """Number of episodes collected per iteration, before its updates."""
    updates_per_step: Annotated[float, Range(0, 1000)] = 0.5
    """Critic updates per collected control step."""
    batch_size: Size = 128
    replay_capacity: Count = 100_000
    """Maximum number of stored observations; the oldest ones are dropped."""
    demonstrations: CountOrZero = 0
    """Episodes of the scripted expert, run before the first iteration and kept throughout."""
    dataset: str | None = None
    """LeRobotDataset (v3.0) with rewards, used as demonstrations instead of a scripted expert."""
    dataset_cameras: list[Label] = field(default_factory=list)
    """Camera names that differ, as policy:dataset pairs: [base:front]."""
    demonstration_share: Annotated[float, Range(0, 1, below=True)] = 0.5
    """Fraction of every batch drawn from the demonstrations, if there are any."""
    sft_coef: NonNegative = 0.0
    """Coefficient of the actor's additional imitation loss on demonstrations (co-training)."""
    gamma: Probability = 0.97
    """Discount factor per gamma_unit."""
    gamma_unit: Annotated[str, OneOf(*GAMMA_UNITS)] = "step"
    """Discount per control step (step) or per policy call (chunk).

    With chunk, rewards within a chunk are not discounted, as in RLinf's chunk_level.
    """
    frozen_backbone: bool = False
    """Train only actor and critics; features are computed once and stored instead of images."""
    noise_bound: Positive | None = None
    """Let the actor output the initial noise of a frozen flow policy (DSRL) instead of actions.

    Each noise dimension is at most this large in magnitude. null: the actor outputs actions.
    """
    critics: Annotated[int, Range(1, 1000)] = 10
    """Number of critics in the ensemble."""
    critic_subset: Annotated[int, Range(1, 1000)] = 2
    """Number of critics drawn per update; the target is the minimum over them (REDQ)."""
    actor_aggregate: Annotated[str, OneOf(*AGGREGATES)] = "mean"
    """Which statistic of the critics the actor maximises: mean or min."""
    actor_every: Count = 2
    """Critic updates per update of the actor and of alpha."""
    hidden: Size = 256
    """Width of the hidden layers of actor and critics."""
    target_rate: Annotated[float, Range(0, 1, above=True)] = 0.005
    """Rate of the moving average that updates the target critics (tau)."""
    initial_alpha: Annotated[float, Range(1e-9, 1e6)] = 0.1
    """Initial entropy temperature alpha, which is learnt."""
    target_entropy: Annotated[float, Range(-1e6, 1e6)] | None = None
    """Target entropy per policy call in nats; null: minus the dimension of the actor's output."""
    backup_entropy: bool = False
    """Include the entropy term in the critics' targets."""
    shift: Annotated[int, Range(0, 1024)] = 4
    """Shift images at random by up to this many pixels (DrQ, Kostrikov et al. 2021); 0: off."""
    learning_rate: LearningRate = 3e-4
    value_learning_rate: LearningRate = 3e-4
    max_grad_norm: Positive = 10.0


class Flow(Protocol):
    """The operations from which an iteration of SAC is composed; a runtime implements them."""

    iteration: int

    def demonstrate(self, episodes: int) -> None:
        """Store the dataset's episodes, or ``episodes`` of the expert, unless already stored."""

    def training_episodes(self, count: int, draw: int) -> Episodes: ...
    def collect_transitions(self, episodes: Episodes) -> int:
        """Run the episodes and store their transitions; return the number of control steps."""

    def update_from_replay(self, updates: int) -> None:
        """Run ``updates`` gradient steps on replay batches."""

    def publish(self) -> None: ...
    def log(self, metrics: dict[str, float]) -> None: ...


class SAC:
    """The SAC algorithm: collect episodes, then update from the replay."""

    def __init__(self, config: SACConfig, temperature: float) -> None:
        self.config, self.temperature = config, temperature
        if config.critic_subset > config.critics:
            raise UserError(f"algorithm.critic_subset={config.critic_subset} is more than algorithm.critics={config.critics}: lower it")
        if config.demonstrations and config.dataset is not None:
            raise UserError("algorithm.dataset and algorithm.demonstrations exclude each other: set only one of them")
        if self._shown and not config.demonstration_share:
            raise UserError("algorithm.demonstration_share=0 disables the demonstrations: raise it, or remove the demonstrations")
        if config.sft_coef and not self._shown:
            raise UserError(f"algorithm.sft_coef={config.sft_coef} needs demonstrations: set algorithm.demonstrations or algorithm.dataset")
        if config.noise_bound is not None and not config.frozen_backbone:
            raise UserError("algorithm.noise_bound needs a frozen policy: set algorithm.frozen_backbone=true")
        if config.noise_bound is not None and self._shown:
            raise UserError("algorithm.noise_bound cannot use demonstrations, which are actions and not noise: remove one of them")

    @property
    def _shown(self) -> bool:
        return self.config.demonstrations > 0 or self.config.dataset is not None

    def check(self, env: EnvSpec) -> None:
        """Accept every environment."""

    def iteration(self, flow: Flow) -> None:
        if self._shown:
            flow.demonstrate(self.config.demonstrations)
        steps = flow.collect_transitions(flow.training_episodes(self.config.episodes, 0))
        flow.update_from_replay(round(steps * self.config.updates_per_step))
        flow.publish()


def soft_target(
    reward: Tensor, discount: Tensor, next_values: Tensor, next_log_prob: Tensor, alpha: Tensor, backup_entropy: bool
) -> Tensor:
    """Return the target ``r + discount (min_j Q_j(s', a') - alpha log pi(a'|s'))`` ``[B]``.

    REDQ, eq. 3. The entropy term is included only with ``backup_entropy``. ``reward`` and
    ``discount`` are those of a chunk: ``gamma**n``, or 0 where the episode terminated.
    ``next_values``: ``[M, B]``, of the critics drawn.
    """
    value = next_values.min(dim=0).values
    if backup_entropy:
        value = value - alpha * next_log_prob
    return reward + discount * torch.where(discount > 0, value, 0)


def critic_loss(values: Tensor, target: Tensor) -> Tensor:
    """Return half the squared error of ``values`` ``[K, B]`` to ``target`` ``[B]``.
    The mean over the batch is summed over the critics, which share no weights."""
    return 0.5 * ((values - target) ** 2).mean(dim=1).sum()


def actor_loss(values: Tensor, log_prob: Tensor, alpha: Tensor, aggregate: str) -> Tensor:
    """Return ``mean(alpha log pi - Q)``, Q being the mean or min of ``values`` ``[K, B]``."""
    value = values.mean(dim=0) if aggregate == "mean" else values.min(dim=0).values
    return (alpha * log_prob - value).mean()


def alpha_loss(log_alpha: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    """Return the loss that adapts alpha to the target entropy (Haarnoja et al. 2018b, eq. 18)."""
    return -(log_alpha.exp() * (log_prob + target_entropy).mean())

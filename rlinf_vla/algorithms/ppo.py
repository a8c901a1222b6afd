"""Proximal policy optimisation (PPO, Schulman et al. 2017) on action chunks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from rlinf_vla.algorithms.advantages import explained_variance, gae, standardise
from rlinf_vla.algorithms.on_policy import Batch, Flow, OnPolicy, OnPolicyConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import (
    Count,
    CountOrZero,
    LearningRate,
    Name,
    NonNegative,
    OneOf,
    Positive,
    Probability,
    Range,
)
from rlinf_vla.core.protocols import EnvSpec
from rlinf_vla.core.types import Trajectory, gather


@dataclass
class PPOConfig(OnPolicyConfig):
    """Recipe node ``algorithm``."""

    name: Name = "ppo"
    horizon: Count = 60
    """Control steps per environment and iteration; a multiple of the episode limit."""
    gae_lambda: Probability = 0.95
    """Decay of generalised advantage estimation, per policy call."""
    bootstrap: Annotated[str, OneOf("truncated", "always")] = "truncated"
    """After which ends the critic estimates what would follow: of ``truncated`` episodes, or
    ``always``, so that a success is worth its reward and a value, as in RLinf's bootstrap_type."""
    normalize_advantages: bool = True
    """Standardise the advantages of an iteration to mean 0 and deviation 1."""
    value_clip: Positive | None = None
    """Clip the value's change in one iteration to this in the value loss; null: no clipping."""
    value_huber: Positive | None = None
    """Threshold of the Huber value loss; null: squared error."""
    value_coef: NonNegative = 0.5
    """Coefficient of the value loss."""
    value_learning_rate: LearningRate = 1e-3
    value_warmup: CountOrZero = 0
    """Number of iterations at the start that train only the critic."""
    epochs: Annotated[int, Range(1, 1000)] = 3


class PPO(OnPolicy):
    """The PPO algorithm, with a critic and GAE."""

    Config = PPOConfig
    config: PPOConfig

    def __init__(self, config: PPOConfig, temperature: float = 1.0, iterations: int = 0) -> None:
        super().__init__(config, temperature, iterations)
        self.value_coef = config.value_coef
        self.value_clip = config.value_clip
        self.value_huber = config.value_huber

    @property
    def keeps_proximal(self) -> bool:
        return False  # an iteration is one update

    def check(self, env: EnvSpec) -> None:
        horizon = self.config.horizon
        limit = env.episode_limit
        if horizon % limit:
            near = max(1, round(horizon / limit)) * limit
            raise UserError(
                f"algorithm.horizon={horizon} is not a multiple of the episode limit of {limit} control steps: use {near}"
            )

    def iteration(self, flow: Flow) -> None:
        rollouts = self.prepared(flow, flow.collect(self.config.horizon))
        batch, metrics = self.advantages(gather(rollouts))
        flow.log(metrics)
        flow.update(batch, self, value_only=flow.iteration < self.config.value_warmup)
        flow.publish()

    def advantages(self, rollouts: Trajectory) -> tuple[Batch, dict[str, float]]:
        """Return all calls as a batch with advantages and value targets, and critic metrics."""
        advantage, target = gae(
            rollouts, self.config.gamma, self.config.gae_lambda, self.config.gamma_unit
        )
        counts = rollouts.valid.any(-1)
        metrics = {
            "critic/explained_variance": explained_variance(rollouts.value, target, counts),
            "critic/value_mean": rollouts.value[counts].mean().item(),
            "critic/return_mean": target[counts].mean().item(),
            "critic/advantage_std": advantage[counts].std(unbiased=False).item(),
        }
        if self.config.normalize_advantages:
            advantage = standardise(advantage, counts)
        return replace(
            self.weighted(rollouts.flatten(), advantage.flatten()), target=target.flatten()
        ), metrics

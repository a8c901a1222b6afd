"""Proximal policy optimisation (Schulman et al. 2017) for action chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rlinf_vla.algorithms.advantages import explained_variance, gae, standardise
from rlinf_vla.algorithms.losses import joint, ppo_policy_loss, value_loss
from rlinf_vla.protocols import Policy
from rlinf_vla.types import Trajectory


@dataclass
class PPOConfig:
    """Recipe node ``algorithm``."""

    name: str = "ppo"
    horizon: int = 60
    """Control steps per environment and iteration; a multiple of the episode limit."""
    gamma: float = 0.99
    """Discount per control step."""
    gae_lambda: float = 0.95
    normalize_advantages: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.2
    value_clip: float | None = None
    """Largest change of a value in one iteration that its loss rewards; null: no clipping."""
    value_coef: float = 0.5
    entropy_coef: float = 0.0
    epochs: int = 3
    minibatch_size: int = 160
    """Policy calls per optimiser step."""
    target_kl: float | None = 0.08
    """Stop an iteration's updates once a minibatch's approximate KL passes this."""
    value_warmup: int = 0
    """Iterations at the start that train the critic alone."""
    learning_rate: float = 1e-4
    value_learning_rate: float = 1e-3
    max_grad_norm: float = 0.5


@dataclass(frozen=True)
class Batch:
    """What an update learns from: ``N`` policy calls, with their advantages and value targets ``[N]``."""

    calls: Trajectory
    advantage: Tensor
    target: Tensor

    def __len__(self) -> int:
        return len(self.advantage)

    def __getitem__(self, index: Any) -> Batch:
        return Batch(self.calls[index], self.advantage[index], self.target[index])

    @property
    def counts(self) -> Tensor:
        """bool ``[N]``: the call executed at least one action."""
        return self.calls.valid.any(-1)


class Flow(Protocol):
    """The operations that a macro flow is made of; a runtime decides where and in what pieces they run."""

    iteration: int

    def collect(self, horizon: int) -> Trajectory: ...
    def update(self, batch: Batch, algorithm: PPO, value_only: bool) -> None: ...
    def publish(self) -> None: ...
    def log(self, metrics: dict[str, float]) -> None: ...


class PPO:
    def __init__(self, config: PPOConfig, temperature: float) -> None:
        self.config, self.temperature = config, temperature

    def iteration(self, flow: Flow) -> None:
        rollouts = flow.collect(self.config.horizon)
        batch, metrics = self.advantages(rollouts)
        flow.log(metrics)
        flow.update(batch, self, value_only=flow.iteration < self.config.value_warmup)
        flow.publish()

    def advantages(self, rollouts: Trajectory) -> tuple[Batch, dict[str, float]]:
        advantage, target = gae(rollouts, self.config.gamma, self.config.gae_lambda)
        counts = rollouts.valid.any(-1)
        metrics = {
            "critic/explained_variance": explained_variance(rollouts.value, target, counts),
            "critic/value_mean": rollouts.value[counts].mean().item(),
            "critic/return_mean": target[counts].mean().item(),
            "critic/advantage_std": advantage[counts].std(unbiased=False).item(),
        }
        if self.config.normalize_advantages:
            advantage = standardise(advantage, counts)
        return Batch(rollouts.flatten(), advantage.flatten(), target.flatten()), metrics

    def loss(self, policy: Policy, batch: Batch, value_only: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Summed loss and summed statistics of a micro-batch."""
        config, calls, mask = self.config, batch.calls, batch.counts
        new = policy.evaluate(calls.inputs, calls.latent, self.temperature)
        critic = value_loss(new.value, calls.value, batch.target, mask, config.value_clip)
        actor, statistics = ppo_policy_loss(
            joint(new.log_prob, calls.valid), joint(calls.log_prob, calls.valid), batch.advantage, mask, config.clip_low, config.clip_high
        )
        entropy = joint(new.entropy, calls.valid)[mask].sum()
        total = config.value_coef * critic
        if not value_only:
            total = total + actor - config.entropy_coef * entropy
        summed = {"actor/pg_loss": actor, "actor/entropy": entropy, "critic/vf_loss": critic}
        summed |= {f"actor/{name}": value for name, value in statistics.items()}
        return total, {name: value.detach() for name, value in summed.items()}

    def enough(self, metrics: dict[str, float]) -> bool:
        """Whether the policy has moved far enough from the one that collected the data."""
        return self.config.target_kl is not None and metrics["actor/approx_kl"] > self.config.target_kl


def parity(policy: Policy, rollouts: Trajectory, temperature: float, calls: int = 64) -> float:
    """Largest difference between stored log-probabilities and those that ``evaluate`` gives now, over the first ``calls`` policy calls."""
    flat = rollouts.flatten()[:calls]
    with torch.no_grad():
        again = policy.evaluate(flat.inputs, flat.latent, temperature).log_prob
    return torch.where(flat.valid[..., None], (again - flat.log_prob).abs(), 0).max().item()

"""Twin delayed DDPG (TD3, Fujimoto et al. 2018) as an external package adds it: an off-policy algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from rlinf_vla.algorithms.base import Trainable
from rlinf_vla.algorithms.feature_policy import Critics, FeaturePolicy, Features, with_fresh_heads
from rlinf_vla.algorithms.off_policy import OffPolicy, OffPolicyConfig, critic_loss
from rlinf_vla.config.ranges import Count, Name, NonNegative, Range
from rlinf_vla.core.protocols import Noise, Policy
from rlinf_vla.core.transitions import ACTION, DISCOUNT, REWARD, Transitions
from rlinf_vla.core.types import ActionEval, ActionSample, Inputs


@dataclass
class TD3Config(OffPolicyConfig):
    """Recipe node ``algorithm``."""

    name: Name = "td3"
    exploration: Annotated[float, Range(1e-6, 10)] = 0.1
    """Standard deviation of the noise on actions in rollouts."""
    smoothing: NonNegative = 0.2
    """Standard deviation of the noise on the target actor's actions, cut off at twice that."""
    actor_every: Count = 2


class TD3Policy(FeaturePolicy):
    """A deterministic actor and two critics on the features of another policy."""

    name: ClassVar[str] = "td3"

    def __init__(self, base: Policy, features: int, config: TD3Config) -> None:
        super().__init__(base, features, config.hidden, 1, config.noise_bound)
        self.value_head = self.critics = Critics(2, features + math.prod(self.size), config.hidden)
        self.exploration = config.exploration

    def mode(self, features: Tensor) -> Tensor:
        return self.actor(features)[:, 0].tanh()

    def act(self, features: Features, noise: Noise | None, temperature: float) -> ActionSample:
        mean = self.mode(features.pooled)
        spread = self.exploration * (temperature or 1.0)
        step = (
            torch.zeros_like(mean)
            if noise is None or temperature == 0
            else noise.normal(*mean.shape[1:])
        )
        chosen = (mean + spread * step).clamp(-1, 1)
        latent = {"step": step} | self.latent(features, chosen)
        return ActionSample(
            self.actions_of(features, chosen),
            latent,
            self.per_action(_log_prob(step, spread)),
            self.value(features),
        )

    def evaluate(self, inputs: Inputs, latent: dict[str, Tensor], temperature: float) -> ActionEval:
        spread = self.exploration * (temperature or 1.0)
        entropy = torch.full_like(
            latent["step"], math.log(spread) + 0.5 * math.log(2 * math.pi * math.e)
        )
        log_prob = _log_prob(latent["step"], spread)
        return ActionEval(
            self.per_action(log_prob), self.per_action(entropy), self.value(self.encode(inputs))
        )


def _log_prob(step: Tensor, spread: float) -> Tensor:
    return -0.5 * step**2 - math.log(spread) - 0.5 * math.log(2 * math.pi)


class TD3(OffPolicy):
    """The TD3 algorithm."""

    Config = TD3Config
    averaged = ("critics", "actor")
    config: TD3Config

    def wrap(self, policy: Policy, seed: int) -> Policy:
        return with_fresh_heads(
            policy,
            self.config.frozen_backbone,
            seed,
            lambda features: TD3Policy(policy, features, self.config),
        )

    def optimizers(self, parameters: Mapping[str, Tensor]) -> dict[str, Optimizer]:
        actor = [value for name, value in parameters.items() if name.startswith("actor.")]
        critic = [value for name, value in parameters.items() if not name.startswith("actor.")]
        return {
            "critic": Adam(critic, lr=self.config.value_learning_rate),
            "actor": Adam(actor, lr=self.config.learning_rate),
        }

    def step(
        self,
        trainer: Trainable,
        batch: Transitions,
        generator: torch.Generator,
        iteration: int,
        index: int,
        shown: Callable[[], Transitions],
    ) -> dict[str, float]:
        policy, target, config = trainer.policy, trainer.target, self.config
        device = next(policy.parameters()).device
        now, following = (
            self.inputs(batch, records, generator, device)
            for records in (batch.now, batch.following)
        )
        action, reward, discount = (
            batch.now[name].to(device) for name in (ACTION, REWARD, DISCOUNT)
        )
        with torch.no_grad():
            after = policy.encode(following).pooled
            noise = (
                batch.own(torch.randn(len(batch), *policy.size, generator=generator))
                .clamp(-2, 2)
                .to(device)
            )
            chosen = (target.actor(after)[:, 0].tanh() + config.smoothing * noise).clamp(-1, 1)
            goal = reward + discount * target.critics(after, chosen).min(dim=0).values
        features = policy.encode(now).pooled
        loss = batch.part(critic_loss(policy.critics(features, action), goal))
        trainer.descend("critic", loss)
        metrics = {"critic/vf_loss": loss, "critic/target_mean": batch.part(goal.mean())}
        if index % config.actor_every == 0:
            policy.critics.requires_grad_(False)
            climbing = batch.part(
                -policy.critics(features.detach(), policy.mode(features.detach()))[0].mean()
            )
            trainer.descend("actor", climbing)
            policy.critics.requires_grad_(True)
            trainer.average(config.target_rate)
            metrics["actor/pg_loss"] = climbing
        return {name: float(value.detach()) for name, value in metrics.items()}

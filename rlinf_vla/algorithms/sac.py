"""Soft actor-critic (SAC) with an ensemble of critics and, optionally, demonstrations.

SAC: Haarnoja et al. 2018. Ensemble: REDQ, Chen et al. 2021. Demonstrations: RLPD, Ball et al. 2023.
In the noise space of a frozen flow policy it is DSRL (Wagenmaker et al. 2025, arXiv 2506.15799).
Refining the chunks of a frozen policy follows RL Token (Xu et al. 2026, arXiv 2604.23073).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from rlinf_vla.algorithms.base import Trainable
from rlinf_vla.algorithms.feature_policy import Critics, FeaturePolicy, Features, with_fresh_heads
from rlinf_vla.algorithms.off_policy import OffPolicy, OffPolicyConfig, critic_loss
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import Count, CountOrZero, Name, NonNegative, OneOf, Range
from rlinf_vla.core.protocols import Noise, Policy
from rlinf_vla.core.transitions import ACTION, DISCOUNT, REWARD, Transitions
from rlinf_vla.core.types import ActionEval, ActionSample, Inputs, Tensors

AGGREGATES = ("mean", "min")
LOG_STD_RANGE = (-5.0, 2.0)
LARGEST_OWN_ACTION = 0.98
"""Bound of an action that the actor refines: the inverse of tanh is infinite at 1."""


@dataclass
class SACConfig(OffPolicyConfig):
    """Recipe node ``algorithm``."""

    name: Name = "sac"
    critics: Annotated[int, Range(1, 1000)] = 10
    """Number of critics in the ensemble."""
    critic_subset: Annotated[int, Range(1, 1000)] = 2
    """Number of critics drawn per update; the target is the minimum over them (REDQ)."""
    actor_aggregate: Annotated[str, OneOf(*AGGREGATES)] = "mean"
    """Which statistic of the critics the actor maximises: mean or min."""
    actor_every: Count = 2
    """Critic updates per update of the actor and of alpha."""
    actor_warmup: CountOrZero = 0
    """Iterations before the first update of actor and alpha: critics first learn what the initial
    policy reaches. An actor that starts as a working policy leaves it for errors of new critics."""
    initial_alpha: Annotated[float, Range(1e-9, 1e6)] = 0.1
    """Initial entropy temperature alpha, which is learnt."""
    target_entropy: Annotated[float, Range(-1e6, 1e6)] | None = None
    """Target entropy per policy call in nats; null: minus the dimension of the actor's output."""
    backup_entropy: bool = False
    """Include the entropy term in the critics' targets."""
    anchor: NonNegative | None = None
    """Let the actor refine the actions of a frozen policy (RL Token), with this coefficient of its
    mean squared distance to them in its loss. null: the actor generates actions from nothing."""


class SAC(OffPolicy):
    """The SAC algorithm."""

    Config = SACConfig
    averaged = ("critics",)
    config: SACConfig

    def __init__(self, config: SACConfig, temperature: float = 1.0, iterations: int = 0) -> None:
        if config.critic_subset > config.critics:
            raise UserError(
                f"algorithm.critic_subset={config.critic_subset} is more than algorithm.critics={config.critics}: lower it"
            )
        if config.anchor is not None and not config.frozen_backbone:
            raise UserError(
                "algorithm.anchor refines the actions of a frozen policy: set algorithm.frozen_backbone=true"
            )
        if config.anchor is not None and config.noise_bound is not None:
            raise UserError(
                "algorithm.anchor refines actions, algorithm.noise_bound generates them from noise: set only one of them"
            )
        super().__init__(config, temperature, iterations)

    def wrap(self, policy: Policy, seed: int) -> SACPolicy:
        return with_fresh_heads(
            policy,
            self.config.frozen_backbone,
            seed,
            lambda features: SACPolicy(policy, features, self.config),
        )

    def optimizers(self, parameters: Mapping[str, Tensor]) -> dict[str, Optimizer]:
        """Return those of the actor, of alpha and of all else: critics and encoder."""
        groups: dict[str, list[Tensor]] = {"critic": [], "actor": [], "alpha": []}
        for name, value in parameters.items():
            if not name.startswith("feature_"):
                groups[
                    "alpha"
                    if name == "log_alpha"
                    else "actor"
                    if name.startswith("actor.")
                    else "critic"
                ].append(value)
        rates = {"critic": self.config.value_learning_rate}
        return {
            name: Adam(group, lr=rates.get(name, self.config.learning_rate), fused=True)
            for name, group in groups.items()
        }

    def target_entropy(self, policy: SACPolicy) -> float:
        """Return the target entropy per policy call in nats."""
        return (
            -float(math.prod(policy.size))
            if self.config.target_entropy is None
            else self.config.target_entropy
        )

    def step(
        self,
        trainer: Trainable,
        batch: Transitions,
        generator: torch.Generator,
        iteration: int,
        index: int,
        demonstrations: Callable[[], Transitions],
    ) -> dict[str, float]:
        """Update the critics and, every ``actor_every`` updates, actor and alpha."""
        policy, config = trainer.policy, self.config
        device = policy.log_alpha.device
        with_actor = iteration >= config.actor_warmup and index % config.actor_every == 0
        imitated = demonstrations() if config.sft_coef and with_actor else None
        now, following = (
            self.inputs(batch, records, generator, device)
            for records in (batch.now, batch.following)
        )
        action, reward, discount = (
            batch.now[name].to(device) for name in (ACTION, REWARD, DISCOUNT)
        )
        size = (len(batch), *policy.size)
        chosen = torch.randperm(config.critics, generator=generator)[: config.critic_subset].to(
            device
        )
        alpha = policy.log_alpha.exp().detach()
        features = policy.encode(now).pooled
        if index == 0:
            policy.standardise(features, lambda values: trainer.total(batch.part(values.mean(0))))
        with torch.no_grad():
            next_features = policy.encode(following).pooled
            next_action, next_log_prob = policy.draw(
                next_features, batch.own(torch.randn(size, generator=generator)).to(device)
            )
            values = trainer.target.critics(policy.standard(next_features), next_action, chosen)
            target = soft_target(
                reward, discount, values, next_log_prob, alpha, config.backup_entropy
            )
        estimates = policy.critics(policy.standard(features), action)
        loss = batch.part(critic_loss(estimates, target))
        seen = (features, next_features)
        penalty, statistics = self.penalty(policy, batch, generator, iteration, seen, estimates)
        trainer.descend("critic", loss + penalty)
        trainer.average(config.target_rate)
        metrics = statistics | {
            "critic/vf_loss": loss,
            "critic/value_mean": batch.part(estimates.mean()),
            "critic/target_mean": batch.part(target.mean()),
        }
        if with_actor:
            drawn, log_prob = policy.draw(
                features.detach(), batch.own(torch.randn(size, generator=generator)).to(device)
            )
            policy.critics.requires_grad_(
                False
            )  # the actor's loss does not train them, and their gradient would double its cost
            reached = policy.critics(policy.standard(features.detach()), drawn)
            climbing = batch.part(actor_loss(reached, log_prob, alpha, config.actor_aggregate))
            total = climbing
            if imitated is not None:
                with torch.no_grad():
                    shown_features = policy.encode(
                        self.inputs(imitated, imitated.now, generator, device)
                    ).pooled
                metrics["sft/loss"] = imitated.part(
                    policy.imitation(shown_features, imitated.now[ACTION].to(device)).mean()
                )
                total = total + config.sft_coef * metrics["sft/loss"]
            if config.anchor is not None:
                metrics["actor/distance"] = batch.part(
                    (drawn - policy.own_actions(features.detach())).pow(2).mean()
                )
                total = total + config.anchor * metrics["actor/distance"]
            trainer.descend("actor", total)
            policy.critics.requires_grad_(True)
            trainer.descend(
                "alpha",
                batch.part(
                    alpha_loss(policy.log_alpha, log_prob.detach(), self.target_entropy(policy))
                ),
            )
            metrics |= {
                "actor/pg_loss": climbing,
                "actor/entropy": batch.part(-log_prob.mean()),
                "actor/alpha": batch.part(alpha),
            }
        return {name: float(value.detach()) for name, value in metrics.items()}

    def penalty(
        self,
        policy: SACPolicy,
        batch: Transitions,
        generator: torch.Generator,
        iteration: int,
        seen: tuple[Tensor, Tensor],
        estimates: Tensor,
    ) -> tuple[Tensor | float, Tensors]:
        """Return a term of the critics' loss beside ``critic_loss``, and its metrics: none here.

        ``seen``: features ``[n, F]`` now and at the next observation. ``estimates``: values
        ``[K, n]`` of the stored actions. Of a trainer rank's rows, see ``ReplayLearner.step``.
        """
        return 0.0, {}


def soft_target(
    reward: Tensor,
    discount: Tensor,
    next_values: Tensor,
    next_log_prob: Tensor,
    alpha: Tensor,
    backup_entropy: bool,
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


def actor_loss(values: Tensor, log_prob: Tensor, alpha: Tensor, aggregate: str) -> Tensor:
    """Return ``mean(alpha log pi - Q)``, Q being the mean or min of ``values`` ``[K, B]``."""
    value = values.mean(dim=0) if aggregate == "mean" else values.min(dim=0).values
    return (alpha * log_prob - value).mean()


def alpha_loss(log_alpha: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    """Return the loss that adapts alpha to the target entropy (Haarnoja et al. 2018b, eq. 18)."""
    return -(log_alpha.exp() * (log_prob + target_entropy).mean())


def squash(pre: Tensor, mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``tanh(pre)`` and its elementwise log-density for normally distributed ``pre``.

    Haarnoja et al. 2018, appendix C. ``log(1 - tanh(x)**2)`` is computed as
    ``2 (log 2 - x - softplus(-2 x))``, which stays accurate in the tails.
    """
    log_prob = -0.5 * ((pre - mean) * (-log_std).exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
    return pre.tanh(), log_prob - 2 * (math.log(2) - pre - F.softplus(-2 * pre))


class SACPolicy(FeaturePolicy):
    """A squashed Gaussian actor and an ensemble of critics on the features of another policy."""

    name: ClassVar[str] = "sac"
    critics: Critics

    def __init__(self, base: Policy, features: int, config: SACConfig) -> None:
        super().__init__(
            base, features, config.hidden, 2, config.noise_bound, config.anchor is not None
        )
        self.value_head = self.critics = Critics(
            config.critics, self.features + math.prod(self.size), config.hidden
        )
        if self.refine:  # the first actor is the policy that it refines
            for parameter in self.actor[-2].parameters():
                nn.init.zeros_(parameter)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(config.initial_alpha)))

    def mode(self, features: Tensor) -> Tensor:
        return self.distribution(features)[0].tanh()

    def distribution(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation ``[B, *size]``, both before squashing."""
        mean, free = self.actor(self.standard(features)).unbind(1)
        if self.refine:
            mean = (
                mean
                + self.own_actions(features).clamp(-LARGEST_OWN_ACTION, LARGEST_OWN_ACTION).atanh()
            )
        low, high = LOG_STD_RANGE
        return mean, low + 0.5 * (high - low) * (free.tanh() + 1)

    def draw(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Sample outputs ``[B, *size]`` and log-probabilities ``[B]`` by reparameterisation.

        ``noise``: standard normal ``[B, *size]``.
        """
        mean, log_std = self.distribution(features)
        chosen, log_prob = squash(mean + log_std.exp() * noise, mean, log_std)
        return chosen, log_prob.flatten(1).sum(dim=1)

    def act(self, features: Features, noise: Noise | None, temperature: float) -> ActionSample:
        mean, log_std = self.distribution(features.pooled)
        spread = log_std + math.log(temperature or 1.0)
        pre = (
            mean
            if noise is None or temperature == 0
            else mean + spread.exp() * noise.normal(*mean.shape[1:])
        )
        chosen, log_prob = squash(pre, mean, spread)
        latent = {"pre": pre} | self.latent(features, chosen)
        return ActionSample(
            self.actions_of(features, chosen),
            latent,
            self.per_action(log_prob),
            self.value(features),
        )

    def evaluate(self, inputs: Inputs, latent: dict[str, Tensor], temperature: float) -> ActionEval:
        features = self.encode(inputs)
        mean, log_std = self.distribution(features.pooled)
        spread = log_std + math.log(temperature or 1.0)
        entropy = spread + 0.5 * math.log(2 * math.pi * math.e)  # before the squashing
        log_prob = squash(latent["pre"], mean, spread)[1]
        return ActionEval(self.per_action(log_prob), self.per_action(entropy), self.value(features))

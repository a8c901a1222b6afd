"""Advantage actor-critic (A2C, Mnih et al. 2016) as an external package adds it: an on-policy algorithm."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlinf_vla.algorithms.advantages import gae
from rlinf_vla.algorithms.on_policy import Batch, Flow, OnPolicy, OnPolicyConfig, joint, value_loss
from rlinf_vla.config.ranges import Count, LearningRate, Name, NonNegative, Probability
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import gather


@dataclass
class A2CConfig(OnPolicyConfig):
    """Recipe node ``algorithm``."""

    name: Name = "a2c"
    horizon: Count = 12
    """Control steps per environment and iteration."""
    gae_lambda: Probability = 1.0
    value_coef: NonNegative = 0.5
    value_learning_rate: LearningRate = 1e-3


class A2C(OnPolicy):
    """A step of gradient ascent on complete rollouts, without a probability ratio."""

    Config = A2CConfig
    config: A2CConfig

    def iteration(self, flow: Flow) -> None:
        rollouts = gather(self.prepared(flow, flow.collect(self.config.horizon)))
        advantage, target = gae(
            rollouts, self.config.gamma, self.config.gae_lambda, self.config.gamma_unit
        )
        batch = self.weighted(rollouts.flatten(), advantage.flatten())
        flow.update(replace(batch, target=target.flatten()), self)
        flow.publish()

    def loss(
        self, policy: Policy, batch: Batch, value_only: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        calls = batch.calls
        assert batch.target is not None
        new = policy.evaluate(calls.inputs, calls.latent, self.temperature)
        log_prob = joint(new.log_prob, calls.valid)
        entropy = joint(new.entropy, calls.valid).sum()
        actor = -(batch.weight * batch.advantage * log_prob)[batch.counts].sum()
        critic = value_loss(new.value, calls.value, batch.target, batch.counts, clip=None)
        total = actor - self.config.entropy_coef * entropy + self.config.value_coef * critic
        metrics = {"actor/pg_loss": actor, "actor/entropy": entropy, "critic/vf_loss": critic}
        return total, {name: torch.as_tensor(value).detach() for name, value in metrics.items()}

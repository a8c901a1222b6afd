"""Take SAC's optimiser steps: critics and encoder, actor, alpha; average the target critics."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from rlinf_vla.algorithms.augmentation import shift_images
from rlinf_vla.algorithms.sac import (
    ACTED,
    ACTION,
    DISCOUNT,
    REWARD,
    SACConfig,
    actor_loss,
    alpha_loss,
    critic_loss,
    soft_target,
)
from rlinf_vla.algorithms.sac_policy import SACPolicy
from rlinf_vla.core.types import Tensors
from rlinf_vla.training.replay import Transitions

_TARGET = "target."


class SACTrainer:
    """Optimisers and target critics of a ``SACPolicy``."""

    def __init__(self, policy: SACPolicy, config: SACConfig) -> None:
        self.policy, self.config = policy, config
        self.parameters = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
        self.target = copy.deepcopy(policy.critics).requires_grad_(False)
        actor = list(policy.actor.parameters())
        own = {id(parameter) for parameter in [*actor, policy.log_alpha]}
        critics = [parameter for parameter in self.parameters.values() if id(parameter) not in own]
        self.optimizers = {
            "critic": torch.optim.Adam(critics, lr=config.value_learning_rate, fused=True),
            "actor": torch.optim.Adam(actor, lr=config.learning_rate, fused=True),
            "alpha": torch.optim.Adam([policy.log_alpha], lr=config.learning_rate, fused=True),
        }
        self.target_entropy = -float(math.prod(policy.size)) if config.target_entropy is None else config.target_entropy

    def step(self, batch: Transitions, generator: torch.Generator, with_actor: bool, shown: Transitions | None = None) -> dict[str, float]:
        """Update the critics and, if ``with_actor``, actor and alpha; return statistics.

        The encoder learns only from the critics' loss. ``shown``: demonstrations that the actor
        also imitates (``sft_coef``). ``generator`` (on the CPU) is the only source of randomness.
        Raises FloatingPointError if a gradient is not finite.
        """
        policy, config = self.policy, self.config
        device = policy.log_alpha.device
        now, following = (self._inputs(records, generator, device) for records in (batch.now, batch.following))
        action, reward, discount = (batch.now[name].to(device) for name in (ACTION, REWARD, DISCOUNT))
        size = (len(reward), *policy.size)
        chosen = torch.randperm(config.critics, generator=generator)[: config.critic_subset].to(device)
        alpha = policy.log_alpha.exp().detach()
        with torch.no_grad():
            next_features = policy.encode(following).pooled
            next_action, next_log_prob = policy.draw(next_features, torch.randn(size, generator=generator).to(device))
            values = self.target(next_features, next_action, chosen)
            target = soft_target(reward, discount, values, next_log_prob, alpha, config.backup_entropy)
        features = policy.encode(now).pooled
        found = policy.critics(features, action)
        loss = critic_loss(found, target)
        self._descend("critic", loss)
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), policy.critics.parameters(), strict=True):
                slow.lerp_(fast, config.target_rate)
        metrics = {"critic/vf_loss": loss, "critic/value_mean": found.mean(), "critic/target_mean": target.mean()}
        if with_actor:
            drawn, log_prob = policy.draw(features.detach(), torch.randn(size, generator=generator).to(device))
            policy.critics.requires_grad_(False)  # the actor's loss does not train them, and their gradient would double its cost
            climbing = actor_loss(policy.critics(features.detach(), drawn), log_prob, alpha, config.actor_aggregate)
            total = climbing
            if shown is not None:
                metrics["sft/loss"] = self._imitation(shown, generator)
                total = total + config.sft_coef * metrics["sft/loss"]
            self._descend("actor", total)
            policy.critics.requires_grad_(True)
            self._descend("alpha", alpha_loss(policy.log_alpha, log_prob.detach(), self.target_entropy))
            metrics |= {"actor/pg_loss": climbing, "actor/entropy": -log_prob.mean(), "actor/alpha": alpha}
        return {name: float(value.detach()) for name, value in metrics.items()}

    def _imitation(self, shown: Transitions, generator: torch.Generator) -> Tensor:
        device = self.policy.log_alpha.device
        with torch.no_grad():
            features = self.policy.encode(self._inputs(shown.now, generator, device)).pooled
        return self.policy.imitation(features, shown.now[ACTION].to(device)).mean()

    def _inputs(self, records: Tensors, generator: torch.Generator, device: torch.device) -> Tensors:
        inputs = {name: value.to(device) for name, value in records.items() if name not in (ACTION, REWARD, DISCOUNT, ACTED)}
        return shift_images(inputs, self.config.shift, generator)

    def _descend(self, which: str, loss: Tensor) -> None:
        optimizer = self.optimizers[which]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], self.config.max_grad_norm)
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient of the {which} is not finite: the step was not taken; lower algorithm.learning_rate")
        optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Return Adam's state by parameter name, and the weights of the target critics."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        slots = {
            f"{names[id(parameter)]}.{slot}": value
            for optimizer in self.optimizers.values()
            for parameter, state in optimizer.state.items()
            for slot, value in state.items()
        }
        return slots | {f"{_TARGET}{name}": value for name, value in self.target.state_dict().items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self.target.load_state_dict({key.removeprefix(_TARGET): value for key, value in tensors.items() if key.startswith(_TARGET)})
        owner = {id(parameter): optimizer for optimizer in self.optimizers.values() for parameter in optimizer.param_groups[0]["params"]}
        for key, value in tensors.items():
            if not key.startswith(_TARGET):
                name, slot = key.rsplit(".", 1)
                parameter = self.parameters[name]
                owner[id(parameter)].state[parameter][slot] = value.clone()

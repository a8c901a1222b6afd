"""What SAC puts on a policy's features: a squashed Gaussian actor and an ensemble of critics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf_vla.protocols import Noise, Policy
from rlinf_vla.types import ActionEval, ActionSample, Inputs, Observation

LOG_STD_RANGE = (-5.0, 2.0)
FEATURES = "features"


def squash(pre: Tensor, mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
    """``tanh(pre)`` and its elementwise log-density where ``pre`` is normal (Haarnoja et al. 2018, appendix C).

    ``log(1 - tanh(x)**2)`` is computed as ``2 (log 2 - x - softplus(-2 x))``, which does not lose the tails.
    """
    log_prob = -0.5 * ((pre - mean) * (-log_std).exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
    return pre.tanh(), log_prob - 2 * (math.log(2) - pre - F.softplus(-2 * pre))


class EnsembleLinear(nn.Module):
    """``K`` linear layers in one batched product."""

    def __init__(self, members: int, in_features: int, out_features: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(in_features)
        self.weight = nn.Parameter(torch.empty(members, in_features, out_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, out_features).uniform_(-bound, bound))

    def forward(self, x: Tensor, chosen: Tensor | slice) -> Tensor:
        """``[K, B, in]`` to ``[K, B, out]``."""
        return torch.baddbmm(self.bias[chosen], x, self.weight[chosen])


class Critics(nn.Module):
    """``K`` critics of (features, action), with layer normalisation (RLPD, Ball et al. 2023)."""

    def __init__(self, members: int, in_features: int, hidden: int) -> None:
        super().__init__()
        self.members = members
        self.layers = nn.ModuleList(EnsembleLinear(members, *sizes) for sizes in ((in_features, hidden), (hidden, hidden), (hidden, 1)))

    def forward(self, features: Tensor, action: Tensor, chosen: Tensor | None = None) -> Tensor:
        """``[B, F]`` and ``[B, C, D]`` to ``[K, B]``, or to those of the members ``chosen``, int64 ``[M]``."""
        rows: Tensor | slice = slice(None) if chosen is None else chosen
        x = torch.cat([features, action.flatten(1)], dim=1)
        x = x.expand(self.members if chosen is None else len(chosen), -1, -1)
        *hidden, last = self.layers
        for layer in hidden:
            x = layer(x, rows)
            x = F.relu(F.layer_norm(x, x.shape[-1:]))
        return last(x, rows)[..., 0]


class SoftPolicy(Policy):
    """A policy's ``prepare`` and ``encode``, with an actor and critics of SAC's own; actions in [-1, 1]. Its own head is not used."""

    name: ClassVar[str] = "soft"
    lora_targets: ClassVar[tuple[str, ...]] = ()

    def __init__(self, base: Policy, features: int, critics: int, hidden: int, initial_alpha: float) -> None:
        """``features``: what ``base.pooled`` returns has so many."""
        super().__init__()
        self.backbone, self.base, self.spec = base.backbone, base, base.spec
        for name, parameter in base.named_parameters():
            if not name.startswith("backbone."):
                parameter.requires_grad_(False)
        size = (self.spec.chunk, self.spec.action_dim)
        self.actor = nn.Sequential(
            *(nn.Linear(features, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.ReLU()),
            *(nn.Linear(hidden, 2 * math.prod(size)), nn.Unflatten(1, (2, *size))),
        )
        self.value_head = self.critics = Critics(critics, features + math.prod(size), hidden)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(initial_alpha)))

    @property
    def frozen(self) -> bool:
        return not any(parameter.requires_grad for parameter in self.backbone.parameters())

    @classmethod
    def load(cls, checkpoint: Path, config: Any) -> Policy:
        raise NotImplementedError("SAC makes it of another policy")

    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        self.base.save(checkpoint, dtype)

    def prepare(self, obs: Observation) -> Inputs:
        return self.base.prepare(obs)

    def fix(self, inputs: Inputs) -> Inputs:
        return {FEATURES: self.encode(inputs)} if self.frozen else inputs

    def encode(self, inputs: Inputs) -> Tensor:
        """``[B, F]``."""
        return inputs[FEATURES] if FEATURES in inputs else self.base.pooled(self.base.encode(inputs))

    def pooled(self, features: Tensor) -> Tensor:
        return features

    def value(self, features: Tensor) -> Tensor:
        return self.critics(features, self.distribution(features)[0].tanh()).mean(0)

    def distribution(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log of the standard deviation before the squashing, ``[B, C, D]``."""
        mean, free = self.actor(features).unbind(1)
        low, high = LOG_STD_RANGE
        return mean, low + 0.5 * (high - low) * (free.tanh() + 1)

    def draw(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions ``[B, C, D]`` and their log-probabilities ``[B]``, by the reparameterisation; ``noise`` standard normal ``[B, C, D]``."""
        mean, log_std = self.distribution(features)
        action, log_prob = squash(mean + log_std.exp() * noise, mean, log_std)
        return action, log_prob.sum(dim=(-2, -1))

    def act(self, features: Tensor, noise: Noise | None, temperature: float) -> ActionSample:
        mean, log_std = self.distribution(features)
        spread = log_std + math.log(temperature or 1.0)
        pre = mean if noise is None or temperature == 0 else mean + spread.exp() * noise.normal(*mean.shape[1:])
        action, log_prob = squash(pre, mean, spread)
        return ActionSample(action, {"pre": pre}, log_prob, self.value(features))

    def evaluate(self, inputs: Inputs, latent: dict[str, Tensor], temperature: float) -> ActionEval:
        features = self.encode(inputs)
        mean, log_std = self.distribution(features)
        spread = log_std + math.log(temperature or 1.0)
        entropy = spread + 0.5 * math.log(2 * math.pi * math.e)  # before the squashing
        return ActionEval(squash(latent["pre"], mean, spread)[1], entropy, self.value(features))

    def supervised_loss(self, inputs: Inputs, actions: Tensor, noise: Noise) -> Tensor:
        return (self.distribution(self.encode(inputs))[0].tanh() - actions).pow(2).mean(dim=(1, 2))

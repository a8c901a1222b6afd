"""SAC networks on a policy's features: a squashed Gaussian actor and an ensemble of critics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf_vla.algorithms.sac import SACConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import Noise, Policy
from rlinf_vla.core.types import ActionEval, ActionSample, Inputs, Observation

LOG_STD_RANGE = (-5.0, 2.0)
FEATURES = "features"
ACTOR_OUTPUT = "chosen"
"""Key in a sample's latent: the actor's output ``[B, ...]`` in [-1, 1], an input of the critics."""


def squash(pre: Tensor, mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``tanh(pre)`` and its elementwise log-density for normally distributed ``pre``.

    Haarnoja et al. 2018, appendix C. ``log(1 - tanh(x)**2)`` is computed as
    ``2 (log 2 - x - softplus(-2 x))``, which stays accurate in the tails.
    """
    log_prob = -0.5 * ((pre - mean) * (-log_std).exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
    return pre.tanh(), log_prob - 2 * (math.log(2) - pre - F.softplus(-2 * pre))


class EnsembleLinear(nn.Module):
    """``K`` linear layers, computed in one batched product."""

    def __init__(self, members: int, in_features: int, out_features: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(in_features)
        self.weight = nn.Parameter(torch.empty(members, in_features, out_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, out_features).uniform_(-bound, bound))

    def forward(self, x: Tensor, chosen: Tensor | slice) -> Tensor:
        """Map ``[K, B, in]`` to ``[K, B, out]`` by the layers ``chosen``."""
        return torch.baddbmm(self.bias[chosen], x, self.weight[chosen])


class Critics(nn.Module):
    """``K`` critics Q(features, action) with layer normalisation (RLPD, Ball et al. 2023)."""

    def __init__(self, members: int, in_features: int, hidden: int) -> None:
        super().__init__()
        self.members = members
        self.layers = nn.ModuleList(EnsembleLinear(members, *sizes) for sizes in ((in_features, hidden), (hidden, hidden), (hidden, 1)))

    def forward(self, features: Tensor, action: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Map ``[B, F]`` and ``[B, C, D]`` to values ``[K, B]``.

        ``chosen``: int64 ``[M]``, the critics to evaluate, then ``[M, B]``; None: all.
        """
        rows: Tensor | slice = slice(None) if chosen is None else chosen
        x = torch.cat([features, action.flatten(1)], dim=1)
        x = x.expand(self.members if chosen is None else len(chosen), -1, -1)
        *hidden, last = self.layers
        for layer in hidden:
            x = layer(x, rows)
            x = F.relu(F.layer_norm(x, x.shape[-1:]))
        return last(x, rows)[..., 0]


@dataclass(frozen=True)
class Features:
    """Features ``base`` (None if only pooled ones are stored) and their ``pooled`` ``[B, F]``."""

    pooled: Tensor
    base: Any = None


class SACPolicy(Policy):
    """SAC's actor and critics on the ``prepare`` and ``encode`` of another policy.

    The actor outputs actions in [-1, 1] in place of the policy's head. With ``noise_bound`` it
    outputs the noise from which that head generates actions.
    """

    name: ClassVar[str] = "soft"
    split_unsupported: ClassVar[str | None] = "is trained by SAC here, which stores rollout features in the trainer process"
    lora_targets: ClassVar[tuple[str, ...]] = ()

    def __init__(self, base: Policy, features: int, config: SACConfig) -> None:
        """Wrap ``base``, whose ``pooled`` returns ``features`` values per row.

        Raises UserError if ``config.noise_bound`` is set but ``base`` has no ``act_from_noise``.
        """
        super().__init__()
        self.noise_bound, hidden = config.noise_bound, config.hidden
        self.backbone, self.base, self.spec = base.backbone, base, base.spec
        for name, parameter in base.named_parameters():
            if not name.startswith("backbone."):
                parameter.requires_grad_(False)
        self.size: tuple[int, ...] = (self.spec.chunk, self.spec.action_dim)
        if config.noise_bound is not None:
            if base.noise_dim is None:
                raise UserError(f"algorithm.noise_bound: model={base.name} has no initial noise: use a flow policy, such as model=pi0")
            self.size = (base.noise_dim,)
        self.actor = nn.Sequential(
            *(nn.Linear(features, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.ReLU()),
            *(nn.Linear(hidden, 2 * math.prod(self.size)), nn.Unflatten(1, (2, *self.size))),
        )
        self.value_head = self.critics = Critics(config.critics, features + math.prod(self.size), hidden)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(config.initial_alpha)))

    @property
    def frozen(self) -> bool:
        return not any(parameter.requires_grad for parameter in self.backbone.parameters())

    @classmethod
    def load(cls, checkpoint: Path, config: Any) -> Policy:
        raise NotImplementedError("SACPolicy wraps another policy: load that one")

    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        self.base.save(checkpoint, dtype)

    def prepare(self, obs: Observation) -> Inputs:
        return self.base.prepare(obs)

    def precompute(self, inputs: Inputs) -> Inputs:
        return {FEATURES: self.encode(inputs).pooled} if self.frozen else inputs

    def encode(self, inputs: Inputs) -> Features:
        if FEATURES in inputs:
            return Features(inputs[FEATURES])
        found = self.base.encode(inputs)
        return Features(self.base.pooled(found), found)

    def pooled(self, features: Features) -> Tensor:
        return features.pooled

    def value(self, features: Features) -> Tensor:
        return self.critics(features.pooled, self.distribution(features.pooled)[0].tanh()).mean(0)

    def distribution(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation ``[B, *size]``, both before squashing."""
        mean, free = self.actor(features).unbind(1)
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
        pre = mean if noise is None or temperature == 0 else mean + spread.exp() * noise.normal(*mean.shape[1:])
        chosen, log_prob = squash(pre, mean, spread)
        actions = chosen if self.noise_bound is None else self.base.act_from_noise(features.base, self.noise_bound * chosen)
        latent = {"pre": pre, ACTOR_OUTPUT: chosen} | ({FEATURES: features.pooled} if self.frozen else {})
        return ActionSample(actions, latent, self._per_action(log_prob), self.value(features))

    def evaluate(self, inputs: Inputs, latent: dict[str, Tensor], temperature: float) -> ActionEval:
        features = self.encode(inputs)
        mean, log_std = self.distribution(features.pooled)
        spread = log_std + math.log(temperature or 1.0)
        entropy = spread + 0.5 * math.log(2 * math.pi * math.e)  # before the squashing
        log_prob = squash(latent["pre"], mean, spread)[1]
        return ActionEval(self._per_action(log_prob), self._per_action(entropy), self.value(features))

    def _per_action(self, values: Tensor) -> Tensor:
        """Bring ``values`` per output dimension to ``[B, C, D]``.

        If the output is noise, it concerns the whole chunk: its sum goes to the first entry.
        """
        if self.noise_bound is None:
            return values
        per_action = values.new_zeros(len(values), self.spec.chunk, self.spec.action_dim)
        per_action[:, 0, 0] = values.sum(dim=1)
        return per_action

    def supervised_loss(self, inputs: Inputs, actions: Tensor, noise: Noise) -> Tensor:
        return self.imitation(self.encode(inputs).pooled, actions)

    def imitation(self, features: Tensor, actions: Tensor) -> Tensor:
        """Return the squared distance ``[B]`` of the mode to ``actions`` ``[B, C, D]``."""
        return (self.distribution(features)[0].tanh() - actions).pow(2).mean(dim=(1, 2))

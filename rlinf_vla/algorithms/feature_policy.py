"""A policy whose own heads act on the features of another one; critics for such features."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf_vla.algorithms.wrapped_policy import WrappedPolicy
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import Noise, Policy
from rlinf_vla.core.types import Inputs

FEATURES = "features"
STANDARD_BOUND = 10.0
"""Standardised features are clipped to this magnitude."""
LEAST_SPREAD = 0.01
"""Least standard deviation that a feature is divided by, relative to the largest one."""
Wrapped = TypeVar("Wrapped", bound=Policy)
ACTOR_OUTPUT = "chosen"
"""Key in a sample's latent: the actor's output ``[B, ...]`` in [-1, 1], an input of the critics."""


@dataclass(frozen=True)
class Features:
    """Features ``base`` (None if only pooled ones are stored) and their ``pooled`` ``[B, F]``."""

    pooled: Tensor
    base: Any = None


class FeaturePolicy(WrappedPolicy):
    """Base of policies with their own ``actor`` on the features of another policy.

    The actor outputs ``size`` numbers: actions in [-1, 1] in place of the policy's head, or, with
    ``noise_bound``, the noise from which that head generates actions. With ``refine``, the features
    end with the actions that the head generates greedily. Subclasses add ``critics``, also as
    ``value_head``. Actor and critics get ``standard`` features.
    """

    critics: nn.Module
    split_unsupported: ClassVar[str | None] = (
        "is trained off-policy here, which stores rollout features in the trainer process"
    )

    def __init__(
        self,
        base: Policy,
        features: int,
        hidden: int,
        outputs: int,
        noise_bound: float | None = None,
        refine: bool = False,
    ) -> None:
        """Wrap ``base``, whose ``pooled`` returns ``features`` values per row.

        ``actor`` maps them to ``[B, outputs, *size]``. Raises UserError if ``noise_bound`` is set
        but ``base`` has no ``act_from_noise``.
        """
        super().__init__(base, shares_critic=False)
        self.noise_bound = noise_bound
        self.refine = refine
        for name, parameter in base.named_parameters():
            if not name.startswith("backbone."):
                parameter.requires_grad_(False)
        self.size: tuple[int, ...] = (self.spec.chunk, self.spec.action_dim)
        if noise_bound is not None:
            if base.noise_dim is None:
                raise UserError(
                    f"algorithm.noise_bound: model={base.name} has no initial noise: use a flow policy, such as model=pi0"
                )
            self.size = (base.noise_dim,)
        self.features = features + (math.prod(self.size) if refine else 0)
        # weights, so that actors and checkpoints have them; no optimiser does
        self.feature_mean = nn.Parameter(torch.zeros(self.features)) if self.frozen else None
        self.feature_spread = nn.Parameter(torch.ones(self.features)) if self.frozen else None
        self.actor = nn.Sequential(
            *(nn.Linear(self.features, hidden), nn.LayerNorm(hidden), nn.ReLU()),
            *(nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.ReLU()),
            *(
                nn.Linear(hidden, outputs * math.prod(self.size)),
                nn.Unflatten(1, (outputs, *self.size)),
            ),
        )

    @property
    def frozen(self) -> bool:
        return not any(parameter.requires_grad for parameter in self.backbone.parameters())

    def precompute(self, inputs: Inputs) -> Inputs:
        return {FEATURES: self.encode(inputs).pooled} if self.frozen else inputs

    def encode(self, inputs: Inputs) -> Features:
        if FEATURES in inputs:
            return Features(inputs[FEATURES])
        features = self.base.encode(inputs)
        pooled = self.base.pooled(features)
        if self.refine:
            pooled = torch.cat(
                [pooled, self.base.act(features, None, 0.0).actions.flatten(1)], dim=1
            )
        return Features(pooled, features)

    def pooled(self, features: Features) -> Tensor:
        return features.pooled

    def standard(self, features: Tensor) -> Tensor:
        """Return ``features`` ``[B, F]`` with mean 0 and deviation 1, if the backbone is frozen.

        Of a frozen network most features hardly vary around a large mean, which hides them from a
        network on top. Features of a backbone that is trained are returned as they are.
        """
        if self.feature_mean is None or self.feature_spread is None:
            return features
        return (
            ((features - self.feature_mean) / self.feature_spread)
            .clamp(-STANDARD_BOUND, STANDARD_BOUND)
            .detach()
        )

    @torch.no_grad()
    def standardise(self, features: Tensor, mean: Callable[[Tensor], Tensor]) -> None:
        """Set what ``standard`` subtracts and divides by, once, from the first ``features``.

        ``mean`` returns the mean over the rows of the whole batch on all ranks.
        """
        if (
            self.feature_mean is None
            or self.feature_spread is None
            or not bool((self.feature_spread == 1).all())
        ):
            return
        centre = mean(features)
        spread = mean((features - centre).square()).sqrt()
        self.feature_mean.copy_(centre)
        self.feature_spread.copy_(
            torch.maximum(spread, LEAST_SPREAD * spread.max()).clamp(min=1e-6)
        )

    def own_actions(self, features: Tensor) -> Tensor:
        """Return the wrapped policy's greedy actions ``[B, C, D]`` in ``features`` (``refine``)."""
        return features[:, -math.prod(self.size) :].unflatten(1, self.size)

    def mode(self, features: Tensor) -> Tensor:
        """Return the most likely output ``[B, *size]``, in [-1, 1], for ``[B, F]``."""
        raise NotImplementedError

    def value(self, features: Features) -> Tensor:
        return self.critics(self.standard(features.pooled), self.mode(features.pooled)).mean(0)

    def actions_of(self, features: Features, chosen: Tensor) -> Tensor:
        """Return the actions ``[B, C, D]`` of the actor's output ``[B, *size]``."""
        return (
            chosen
            if self.noise_bound is None
            else self.base.act_from_noise(features.base, self.noise_bound * chosen)
        )

    def latent(self, features: Features, chosen: Tensor) -> dict[str, Tensor]:
        """Return what a replay record needs of a sample."""
        return {ACTOR_OUTPUT: chosen} | ({FEATURES: features.pooled} if self.frozen else {})

    def per_action(self, values: Tensor) -> Tensor:
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
        return (self.mode(features) - actions).pow(2).mean(dim=(1, 2))


def with_fresh_heads(
    policy: Policy, frozen_backbone: bool, seed: int, wrapped: Callable[[int], Wrapped]
) -> Wrapped:
    """Return ``wrapped(features per row)``, whose random weights depend only on ``seed``."""
    if frozen_backbone:
        policy.backbone.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        features = policy.pooled_width
        torch.manual_seed(seed)
        return wrapped(features)


class EnsembleLinear(nn.Module):
    """``K`` linear layers, computed in one batched product."""

    def __init__(self, members: int, in_features: int, out_features: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(in_features)
        self.weight = nn.Parameter(
            torch.empty(members, in_features, out_features).uniform_(-bound, bound)
        )
        self.bias = nn.Parameter(torch.empty(members, 1, out_features).uniform_(-bound, bound))

    def forward(self, x: Tensor, chosen: Tensor | slice) -> Tensor:
        """Map ``[K, B, in]`` to ``[K, B, out]`` by the layers ``chosen``."""
        return torch.baddbmm(self.bias[chosen], x, self.weight[chosen])


class Critics(nn.Module):
    """``K`` critics Q(features, action) with layer normalisation (RLPD, Ball et al. 2023)."""

    def __init__(self, members: int, in_features: int, hidden: int) -> None:
        super().__init__()
        self.members = members
        self.layers = nn.ModuleList(
            EnsembleLinear(members, *sizes)
            for sizes in ((in_features, hidden), (hidden, hidden), (hidden, 1))
        )

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

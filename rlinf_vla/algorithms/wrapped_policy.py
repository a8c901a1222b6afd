"""A policy around another one, which does what it does unless a subclass overrides it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlinf_vla.core.protocols import Noise, Policy
from rlinf_vla.core.types import ActionEval, ActionSample, Inputs, Observation


class WrappedPolicy(Policy):
    """Base of policies that an algorithm puts around the recipe's, ``base``."""

    lora_targets: ClassVar[tuple[str, ...]] = ()

    def __init__(self, base: Policy, shares_critic: bool = True) -> None:
        """``shares_critic``: the critic is that of ``base``, until a subclass replaces it."""
        super().__init__()
        self.backbone = base.backbone
        if shares_critic:
            self.value_head = base.value_head  # first, so that this is the name of its parameters
        self.base = base
        self.spec = base.spec
        self.merge_adapters = base.merge_adapters
        self.state_limit = base.state_limit

    @classmethod
    def load(cls, checkpoint: Path, config: Any) -> Policy:
        raise NotImplementedError(f"{cls.__name__} wraps another policy: load that one")

    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        self.base.save(checkpoint, dtype)

    def fit_instructions(self, instructions: Sequence[str]) -> None:
        self.base.fit_instructions(instructions)

    def prepare(self, obs: Observation) -> Inputs:
        return self.base.prepare(obs)

    def encode(self, inputs: Inputs) -> Any:
        return self.base.encode(inputs)

    def pooled(self, features: Any) -> Tensor:
        return self.base.pooled(features)

    def value(self, features: Any) -> Tensor:
        return self.base.value(features)

    def act(self, features: Any, noise: Noise | None, temperature: float) -> ActionSample:
        return self.base.act(features, noise, temperature)

    def evaluate(self, inputs: Inputs, latent: dict[str, Tensor], temperature: float) -> ActionEval:
        return self.base.evaluate(inputs, latent, temperature)

    def supervised_loss(self, inputs: Inputs, actions: Tensor, noise: Noise) -> Tensor:
        return self.base.supervised_loss(inputs, actions, noise)

"""The base of a reward's classifier, and what it has in common with a policy."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

import torch
from torch import Tensor, nn

from rlinf_vla.core.devices import device_of
from rlinf_vla.core.types import Inputs, Observation

from .policy import ImageSize, Policy, PolicySpec


class RewardModel(nn.Module):
    """A success classifier, trained by ``rlinf-vla train recipe=reward_classifier``."""

    images: dict[str, ImageSize]
    """Its input images, by camera name."""

    @property
    def spec(self) -> PolicySpec:
        """That of a policy with the same inputs and no actions."""
        return PolicySpec(chunk=1, action_dim=0, state_dim=0, images=self.images)

    @abstractmethod
    def prepare(self, obs: Observation) -> Inputs:
        """Convert an observation to inputs with leading dimension ``B`` that are cheap to store."""

    @abstractmethod
    def forward(self, inputs: Inputs) -> Tensor:
        """Return the logits of success, float32 ``[B]``."""

    @abstractmethod
    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        """Write the plug-in's checkpoint into an existing directory; ``dtype=None``: float32."""


Learner = Policy | RewardModel
"""A network that a trainer can train."""


def prepared(learner: Learner, obs: Observation) -> Inputs:
    """Return the inputs of ``learner``, prepared on its device."""
    return learner.prepare(obs.to(device_of(learner)))

"""Protocols that a reward plug-in implements."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlinf_vla.core.devices import device_of
from rlinf_vla.core.types import Inputs, Observation, StepResult

from .env import EnvSpec
from .policy import ImageSize, Policy, PolicySpec


class Reward(Protocol):
    """The reward for training; evaluation always uses the simulator's success signal."""

    def __call__(self, before: Observation, actions: Tensor, result: StepResult) -> StepResult:
        """Return ``result`` with ``reward`` ``[B, C]`` replaced by this reward.

        ``actions`` ``[B, C, D]`` were executed after observation ``before``. The reward may set
        ``terminated`` in a row's last valid step to end that episode. Invalid steps are ignored.
        """


class RewardModel(nn.Module):
    """A success classifier, trained by ``rlinf-vla train recipe=reward_classifier``."""

    images: dict[str, ImageSize]
    """Its input images, by camera name."""

    @property
    def spec(self) -> PolicySpec:
        """The spec of a policy with the same inputs and no actions."""
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


class RewardPlugin(Protocol):
    """A reward plug-in, registered as an entry point of ``rlinf_vla.rewards``."""

    name: str
    Config: type
    """Dataclass of a recipe's ``reward.options`` node."""

    def create(self, config: Any, env: EnvSpec, device: torch.device) -> Reward:
        """Create the reward. It may compute on ``device``; results are on the device of its inputs.

        Raises UserError for mistakes of the user.
        """

    def learner(self, config: Any) -> RewardModel:
        """Return the trainable network of this reward. Raises UserError if it has none."""

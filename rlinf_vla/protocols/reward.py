"""What a reward implements."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlinf_vla.types import Inputs, Observation, StepResult

from .env import EnvSpec
from .policy import ImageSize, Policy, PolicySpec


class Reward(Protocol):
    """What training is told that an environment group's steps were worth. Evaluations keep the simulator's own word."""

    def __call__(self, before: Observation, actions: Tensor, result: StepResult) -> StepResult:
        """``result`` of ``actions`` ``[B, C, D]``, taken where ``before`` was seen, with this reward as ``reward`` ``[B, C]``.

        It may set ``terminated`` in a row's last valid step, and so end that episode. Where ``valid`` is false nothing is looked at.
        """


class RewardModel(nn.Module):
    """A network that looks whether a task is done, learnt by ``rlinf-vla train recipe=reward_classifier``."""

    images: dict[str, ImageSize]
    """What it looks at."""

    @property
    def spec(self) -> PolicySpec:
        """As of a policy that does nothing."""
        return PolicySpec(chunk=1, action_dim=0, state_dim=0, images=self.images)

    @abstractmethod
    def prepare(self, obs: Observation) -> Inputs:
        """Each tensor with leading dimension ``B``; cheap to store."""

    @abstractmethod
    def forward(self, inputs: Inputs) -> Tensor:
        """Logits of success, float32 ``[B]``."""

    @abstractmethod
    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        """Into an existing directory, such that the plug-in reads it; float32 where ``dtype`` says nothing."""


Learner = Policy | RewardModel
"""What a trainer may train."""


class RewardPlugin(Protocol):
    """A reward, as an entry point of ``rlinf_vla.rewards`` names it."""

    name: str
    Config: type
    """Dataclass: the typed ``reward.options`` node of a recipe."""

    def create(self, config: Any, env: EnvSpec, device: torch.device) -> Reward:
        """``device``: where it may compute; results come back where they were. Raises UserError for what the user can mend."""

    def learner(self, config: Any) -> RewardModel:
        """The network behind it, to be trained. Raises UserError where there is none."""

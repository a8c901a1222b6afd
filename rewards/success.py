"""Sparse reward: 1 in steps where the simulator reports success, 0 elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlinf_vla.config.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlinf_vla.core.protocols import EnvSpec, Reward, RewardModel
    from rlinf_vla.core.types import Observation, StepResult


@dataclass
class SuccessOptions:
    """Recipe node ``reward.options``: no options."""


class Success:
    """Implements ``RewardPlugin``."""

    name = "success"
    Config = SuccessOptions

    def create(self, config: SuccessOptions, env: EnvSpec, device: torch.device) -> Reward:
        return success

    def learner(self, config: SuccessOptions) -> RewardModel:
        raise UserError("reward=success has no model to train: use reward=classifier")


def success(before: Observation, actions: Tensor, result: StepResult) -> StepResult:
    """Return ``result`` with reward 1 in valid steps with success, else 0."""
    return replace(result, reward=(result.success & result.valid).float())


plugin = Success()

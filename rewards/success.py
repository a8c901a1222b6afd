"""1 where the simulator says success, 0 elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlinf_vla.protocols import EnvSpec, Reward, RewardModel
from rlinf_vla.types import Observation, StepResult, UserError


@dataclass
class SuccessOptions:
    """Recipe node ``reward.options``: there is nothing to choose."""


class Success:
    """Implements ``RewardPlugin``."""

    name = "success"
    Config = SuccessOptions

    def create(self, config: SuccessOptions, env: EnvSpec, device: torch.device) -> Reward:
        return success

    def learner(self, config: SuccessOptions) -> RewardModel:
        raise UserError("reward=success learns nothing: use reward=classifier")


def success(before: Observation, actions: Tensor, result: StepResult) -> StepResult:
    return replace(result, reward=(result.success & result.valid).float())


plugin = Success()

"""Dense reward: how much nearer to success a model of values says that the last actions led.

The change of the value is potential-based shaping (Ng, Harada and Russell 1999) without a discount.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlinf_vla.config.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlinf_vla.algorithms.value import ValuePolicy
    from rlinf_vla.core.protocols import EnvSpec, Reward, RewardModel
    from rlinf_vla.core.types import Observation, StepResult


@dataclass
class ProgressOptions:
    """Recipe node ``reward.options``."""

    checkpoint: str | None = None
    """Directory of a model of values, which ``rlinf-vla train recipe=maniskill_value`` wrote."""


class Progress:
    """Implements ``RewardPlugin``."""

    name = "progress"
    Config = ProgressOptions

    def learner(self, config: ProgressOptions) -> RewardModel:
        raise UserError("reward=progress: train its model with algorithm=value, without a reward")

    def check(self, config: ProgressOptions) -> None:
        from rlinf_vla.runtime.value_models import read_value_model

        if config.checkpoint is None:
            raise UserError(
                "reward.options.checkpoint has no value: train a model with `rlinf-vla train recipe=maniskill_value`"
            )
        read_value_model(config.checkpoint, "reward.options.checkpoint")

    def create(self, config: ProgressOptions, env: EnvSpec, device: torch.device) -> Reward:
        from rlinf_vla.runtime.fit import check_fit
        from rlinf_vla.runtime.value_models import load_value_model

        self.check(config)
        model, _ = load_value_model(str(config.checkpoint), "reward.options.checkpoint")
        check_fit(model, env)
        return ProgressReward(model.to(device))


class ProgressReward:
    """The change of the value over a call, in its last step; 0 to 1 from a failure to a success."""

    def __init__(self, model: ValuePolicy) -> None:
        self.model = model

    def __call__(self, before: Observation, actions: Tensor, result: StepResult) -> StepResult:
        gain = self._value(result.observation) - self._value(before)
        from rlinf_vla.core.types import last_true

        last = last_true(result.valid)
        return replace(result, reward=last * gain.to(result.valid.device)[:, None])

    def _value(self, seen: Observation) -> Tensor:
        import torch

        from rlinf_vla.core.protocols import prepared

        with torch.inference_mode():
            return self.model.value(self.model.encode(prepared(self.model, seen))).float()


plugin = Progress()

"""Reward from a user's Python function: ``reward.options.function=my_package.rewards:closer``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING

from omegaconf import MISSING

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import OUTSIDE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlinf_vla.core.protocols import EnvSpec, Reward, RewardModel
    from rlinf_vla.core.types import Observation, StepResult

    Shaped = Callable[[Observation, Tensor, StepResult], Tensor]


@dataclass
class FunctionOptions:
    """Recipe node ``reward.options``."""

    function: str = field(default=MISSING, metadata=OUTSIDE)
    """``module:name`` of the reward function: (observation before the actions, actions ``[B, C,
    D]``, StepResult) -> reward ``[B, C]``."""


class Function:
    """Implements ``RewardPlugin``."""

    name = "function"
    Config = FunctionOptions

    def create(self, config: FunctionOptions, env: EnvSpec, device: torch.device) -> Reward:
        function = _find(config.function)

        def reward(before: Observation, actions: Tensor, result: StepResult) -> StepResult:
            return replace(result, reward=function(before, actions, result))

        return reward

    def learner(self, config: FunctionOptions) -> RewardModel:
        raise UserError("reward=function has no model to train: use reward=classifier")


def _find(location: str) -> Shaped:
    module, _, name = location.partition(":")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"reward.options.function={location} cannot be imported ({error}): write module:name, on PYTHONPATH"
        ) from None
    if not callable(function):
        raise UserError(f"reward.options.function={location} is not a function")
    return function


plugin = Function()

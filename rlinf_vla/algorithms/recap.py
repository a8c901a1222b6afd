"""RECAP: imitate everything that was recorded, told which actions were better than usual.

π*0.6 (arXiv 2511.14759, section IV-B): whether an action's advantage is among the best of its task
is told by a text after the instruction, which is left out of some rows. The policy acts as if told
that it is. Both answers, with the text and without it, allow to extrapolate (classifier-free
guidance, arXiv 2207.12598). ``rlinf-vla label`` writes the labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from rlinf_vla.algorithms.base import DEMONSTRATIONS, DemonstrationConfig
from rlinf_vla.algorithms.conditions import told, untold
from rlinf_vla.algorithms.sft import SFT, SFTConfig
from rlinf_vla.algorithms.wrapped_policy import WrappedPolicy
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import Label, Name, NonNegative, Probability
from rlinf_vla.core.protocols import Noise, Policy, RealTimeChunking
from rlinf_vla.core.types import ActionSample, Inputs, Observation

_WITHOUT = "without."
"""Prefix of the inputs of the instruction alone."""


@dataclass
class LabelledDemonstrationConfig(DemonstrationConfig):
    """Recipe node ``algorithm.demonstrations``."""

    advantage_key: Label = "advantage_positive"  # type: ignore[misc]
    """Feature that is true where the advantage is among the best of the task."""


@dataclass
class RecapConfig(SFTConfig):
    """Recipe node ``algorithm``."""

    name: Name = "recap"
    demonstrations: LabelledDemonstrationConfig = field(default_factory=LabelledDemonstrationConfig)
    """Labelled datasets: ``rlinf-vla label`` writes them."""
    condition_dropout: Probability = 0.1
    """Fraction of the rows that are not told."""
    guidance: NonNegative = 1.0
    """Scale of guidance when the policy acts: 1 acts as told, more exaggerates it, and 0 acts as if
    nothing was told."""


class Told(NamedTuple):
    """Features with and without the condition; ``without``: None if they are not needed."""

    features: Any
    without: Any


class ConditionedPolicy(WrappedPolicy):
    """Add the condition to the instructions of ``base``, and act as told that it holds.

    An instruction that has a condition keeps it.
    """

    name: ClassVar[str] = "recap"
    split_unsupported: ClassVar[str | None] = "is told its advantage, which has no split here"

    def __init__(self, base: Policy, dropout: float, guidance: float) -> None:
        super().__init__(base)
        self.augmentation_unsupported = base.augmentation_unsupported
        self.horizon = base.horizon
        self.dropout = dropout
        self.guidance = guidance

    def fit_instructions(self, instructions: Sequence[str]) -> None:
        self.base.fit_instructions(
            [told(text, positive) for text in instructions for positive in (True, False)]
        )

    def prepare(self, obs: Observation) -> Inputs:
        return self._both(obs, self.base.prepare(_told(obs)))

    def prepare_to_augment(self, obs: Observation) -> Inputs:
        return self._both(obs, self.base.prepare_to_augment(_told(obs)))

    def augment(self, inputs: Inputs, noise: Noise) -> Inputs:
        return self.base.augment(inputs, noise)

    def _both(self, obs: Observation, inputs: Inputs) -> Inputs:
        without = replace(obs, instruction=[untold(text) for text in obs.instruction])
        return inputs | {
            _WITHOUT + name: value for name, value in self.base.prompt(without).items()
        }

    def encode(self, inputs: Inputs) -> Told:
        features = self.base.encode(inputs)
        if self.guidance == 1:
            return Told(features, None)
        return Told(features, self.base.encode(inputs | untold_inputs(inputs)))

    def pooled(self, features: Told) -> Tensor:
        return self.base.pooled(features.features)

    def value(self, features: Told) -> Tensor:
        return self.base.value(features.features)

    def act(self, features: Told, noise: Noise | None, temperature: float) -> ActionSample:
        return self.base.act(self._guided(features), noise, temperature)

    def _guided(self, features: Told) -> Any:
        if features.without is None:
            return features.features
        return self.base.guided(*features, self.guidance)

    def supervised_loss(self, inputs: Inputs, actions: Tensor, noise: Noise) -> Tensor:
        """Return the loss of ``base``, of which ``dropout`` of the rows are not told."""
        dropped = noise.uniform(1)[:, 0] < self.dropout
        chosen = dict(inputs)
        for name, value in untold_inputs(inputs).items():
            rows = dropped.reshape(-1, *[1] * (value.ndim - 1))
            chosen[name] = torch.where(rows, value, inputs[name])
        return self.base.supervised_loss(chosen, actions, noise)


class ConditionedChunkingPolicy(ConditionedPolicy):
    """The same of a policy for ``control.real_time_chunking``."""

    def act_with_prefix(
        self,
        features: Told,
        noise: Noise | None,
        temperature: float,
        committed: Tensor,
        frozen: int,
    ) -> ActionSample:
        """See ``RealTimeChunking``."""
        base: Any = self.base
        sample: ActionSample = base.act_with_prefix(
            self._guided(features), noise, temperature, committed, frozen
        )
        return sample


def untold_inputs(inputs: Inputs) -> Inputs:
    """Return those that the instruction alone gives, in place of the ones that tell."""
    return {
        name.removeprefix(_WITHOUT): value
        for name, value in inputs.items()
        if name.startswith(_WITHOUT)
    }


def _told(obs: Observation) -> Observation:
    return replace(obs, instruction=[told(instruction) for instruction in obs.instruction])


class Recap(SFT):
    """Imitation of labelled datasets by a policy that is told the labels."""

    Config = RecapConfig
    config: RecapConfig
    asks_policy = True

    def __init__(self, config: Any, temperature: float = 1.0, iterations: int = 0) -> None:
        super().__init__(config, temperature, iterations)
        if not config.demonstrations.datasets:
            raise UserError(
                f"algorithm=recap learns from labelled datasets: set {DEMONSTRATIONS}.dataset=DIR, which rlinf-vla label wrote"
            )

    def require(self, policy: Policy) -> None:
        """Raise UserError if the instructions of ``policy`` cannot have a condition."""
        if (reason := policy.condition_unsupported) is not None:
            raise UserError(f"algorithm=recap: model={policy.name} {reason}")

    def wrap(self, policy: Policy, seed: int) -> ConditionedPolicy:
        self.require(policy)
        chunking = isinstance(policy, RealTimeChunking)
        wrapped = ConditionedChunkingPolicy if chunking else ConditionedPolicy
        return wrapped(policy, self.config.condition_dropout, self.config.guidance)

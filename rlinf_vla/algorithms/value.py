"""Train a model of values on recorded episodes, for advantage labels and for a dense reward.

It predicts a distribution over the normalised return of an episode (``advantage_labels.py``): how
many steps are left until success, and whether there will be one (π*0.6, arXiv 2511.14759, section
IV-A). The head is on the features of any policy, whose backbone learns with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf_vla.algorithms.advantage_labels import BINS, expected, two_hot
from rlinf_vla.algorithms.augmentation import shift_images
from rlinf_vla.algorithms.base import DEMONSTRATIONS, DemonstrationConfig
from rlinf_vla.algorithms.feature_policy import with_fresh_heads
from rlinf_vla.algorithms.sft import Draws, StepFlow, Supervised, drawn_rows, warmup_cosine
from rlinf_vla.algorithms.wrapped_policy import WrappedPolicy
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import (
    Count,
    CountOrZero,
    LearningRate,
    Name,
    NonNegative,
    Positive,
    Probability,
    Range,
    Size,
)
from rlinf_vla.config.recipe import SUPERVISED, AlgorithmConfig
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import Batched, Inputs

LONGEST = "longest_episodes"
"""Key of a checkpoint's state: steps of the longest episode of each task."""


@dataclass
class ValueConfig(AlgorithmConfig):
    """Recipe node ``algorithm``."""

    family: ClassVar[str] = SUPERVISED
    acts: ClassVar[bool] = False

    name: Name = "value"
    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    """Datasets of successes and failures, with the feature ``next.success``."""
    failure: NonNegative = 1.0
    """Cost of a failure, in steps of the longest episode of its task."""
    held_out: Annotated[float, Range(0, 0.5, above=True)] = 0.1
    """Fraction of the episodes held out for validation."""
    hidden: Size = 256
    """Width of the value head."""
    frozen_backbone: bool = False
    """Train the value head alone."""
    shift: Annotated[int, Range(0, 1024)] = 0
    """Shift images at random by up to this many pixels; 0: off."""
    batch_size: Size = 64
    learning_rate: LearningRate = 1e-3
    value_learning_rate: LearningRate = 1e-3
    warmup_steps: CountOrZero = 20
    decay_steps: Count | None = None
    """Step at which the learning rate reaches 0, on a half cosine; null: iterations."""
    weight_decay: Probability = 0.01
    max_grad_norm: Positive = 1.0


@dataclass(frozen=True)
class Returns(Batched):
    """``N`` prepared observations, their normalised returns float32 ``[N]``, and the numbers of
    their episodes int64 ``[N]``, over all datasets.

    weight: as of ``Demonstrations``.
    """

    inputs: Inputs
    returns: Tensor
    episode: Tensor
    weight: Tensor | None = None

    @property
    def counts(self) -> Tensor:
        return torch.ones(len(self), dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.returns)


class Flow(StepFlow, Protocol):
    """The operations of value training; a runtime implements them."""

    def returns(
        self, config: DemonstrationConfig, failure: float
    ) -> tuple[Returns, dict[str, int]]:
        """Return all frames of the datasets, and the steps of each task's longest episode."""

    def fit(self, batch: Returns, rate: float) -> None:
        """Take one optimiser step with ``rate`` times the learning rate."""


class ValuePolicy(WrappedPolicy):
    """A policy whose ``value_head`` predicts the logits of ``BINS`` returns, ``[B, BINS]``."""

    name: ClassVar[str] = "value"

    def __init__(self, base: Policy, features: int, hidden: int) -> None:
        super().__init__(base)
        for name, parameter in base.named_parameters():
            if not name.startswith("backbone."):
                parameter.requires_grad_(False)
        self.value_head = nn.Sequential(
            nn.Linear(features, hidden),
            nn.LayerNorm(hidden),
            nn.GELU(),
            nn.Linear(hidden, BINS),
        )

    def logits(self, inputs: Inputs) -> Tensor:
        return self.value_head(self.pooled(self.encode(inputs)))

    def value(self, features: Any) -> Tensor:
        return expected(self.value_head(self.pooled(features)))


class ValueTraining(Supervised):
    """Value training: each iteration is one optimiser step on frames of the datasets."""

    Config = ValueConfig
    config: ValueConfig
    adds_heads = True
    product = ("value", "reward.options.checkpoint of reward=progress, or value of rlinf-vla label")

    def __init__(self, config: Any, temperature: float = 1.0, iterations: int = 0) -> None:
        super().__init__(config, temperature, iterations)
        if not config.demonstrations.datasets:
            raise UserError(
                f"algorithm=value learns from recorded episodes: set {DEMONSTRATIONS}.dataset=DIR"
            )
        self.longest: dict[str, int] = {}

    def wrap(self, policy: Policy, seed: int) -> Policy:
        config = self.config
        return with_fresh_heads(
            policy,
            config.frozen_backbone,
            seed,
            lambda features: ValuePolicy(policy, features, config.hidden),
        )

    def iteration(self, flow: Flow) -> None:
        config = self.config
        frames, self.longest = flow.returns(config.demonstrations, config.failure)
        generator = flow.generator()
        learnt = (~self.is_held_out(frames)).nonzero()[:, 0]
        weight = None if frames.weight is None else frames.weight[learnt]
        rows = drawn_rows(weight, len(learnt), config.batch_size, generator)
        batch = frames[learnt[rows]]
        inputs = shift_images(batch.inputs, config.shift, generator)
        flow.fit(
            Returns(inputs, batch.returns, batch.episode),
            warmup_cosine(
                flow.iteration, config.warmup_steps, config.decay_steps or self.iterations
            ),
        )

    def is_held_out(self, frames: Returns) -> Tensor:
        """Return which frames are of episodes that validate, bool ``[N]``: every ``n``-th one, at
        least one. Raises UserError if there is only one episode."""
        episodes = int(frames.episode.max()) + 1
        if episodes < 2:
            raise UserError("algorithm=value needs two episodes: one is held out for validation")
        every = min(round(1 / self.config.held_out), episodes)
        return frames.episode % every == every - 1

    def loss(self, model: Any, batch: Any, draws: Draws) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the cross-entropy with the two bins next to the return, summed over the batch."""
        logits = model.logits(batch.inputs).float()
        loss = F.cross_entropy(logits, two_hot(batch.returns), reduction="sum")
        error = (expected(logits.detach()) - batch.returns).abs().sum()
        return loss, {"value/loss": loss.detach(), "value/error": error}

    def predict(self, model: Any, inputs: Inputs) -> Tensor:
        return model.value(model.encode(inputs))

    def state(self) -> dict[str, Any]:
        return {LONGEST: self.longest}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.longest = dict(state.get(LONGEST, {}))

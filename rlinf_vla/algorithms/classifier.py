"""Train a success classifier for rewards on labelled frames (HIL-SERL, arXiv 2410.21845)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf_vla.algorithms.augmentation import shift_images
from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.algorithms.sft import Draws, StepFlow, Supervised, warmup_cosine
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import (
    CountOrZero,
    LearningRate,
    Name,
    Positive,
    Probability,
    Range,
    Size,
)
from rlinf_vla.config.recipe import SUPERVISED, AlgorithmConfig
from rlinf_vla.core.types import Batched, Inputs


@dataclass
class ClassifierConfig(AlgorithmConfig):
    """Recipe node ``algorithm``."""

    family: ClassVar[str] = SUPERVISED
    acts: ClassVar[bool] = False
    trains_reward: ClassVar[bool] = True

    name: Name = "classifier"
    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    """Source of the frames: a scripted expert under noise, so that it also fails, or a dataset.

    A dataset needs the feature ``next.success``.
    """
    held_out: Annotated[float, Range(0, 1, above=True, below=True)] = 0.2
    """Fraction of the episodes held out for validation."""
    batch_size: Size = 64
    """Frames per optimiser step, half of them of success."""
    shift: Annotated[int, Range(0, 1024)] = 4
    """Shift images at random by up to this many pixels; 0: off."""
    learning_rate: LearningRate = 1e-3
    warmup_steps: CountOrZero = 20
    weight_decay: Probability = 0.01
    max_grad_norm: Positive = 1.0


@dataclass(frozen=True)
class Frames(Batched):
    """``N`` prepared observations, success labels bool ``[N]``, episode numbers int64 ``[N]``."""

    inputs: Inputs
    success: Tensor
    episode: Tensor

    @property
    def counts(self) -> Tensor:
        return torch.ones_like(self.success)

    def __len__(self) -> int:
        return len(self.success)


class Flow(StepFlow, Protocol):
    """The operations of classifier training; a runtime implements them."""

    def label(self, config: DemonstrationConfig) -> Frames:
        """Return all labelled frames; the first iteration of a run collects or reads them."""

    def fit(self, batch: Frames, rate: float) -> None:
        """Take one optimiser step with ``rate`` times the learning rate."""


class ClassifierTraining(Supervised):
    """Classifier training: each iteration is one optimiser step on a balanced batch of frames."""

    Config = ClassifierConfig
    config: ClassifierConfig
    product = ("classifier", "reward=classifier reward.options.checkpoint")

    def iteration(self, flow: Flow) -> None:
        frames = flow.label(self.config.demonstrations)
        generator = flow.generator()
        learnt, _ = self.split(frames)
        batch = frames[learnt[balanced(frames.success[learnt], self.config.batch_size, generator)]]
        batch = Frames(
            shift_images(batch.inputs, self.config.shift, generator), batch.success, batch.episode
        )
        flow.fit(batch, warmup_cosine(flow.iteration, self.config.warmup_steps, self.iterations))

    def loss(self, model: Any, batch: Any, draws: Draws) -> tuple[Tensor, dict[str, Tensor]]:
        """Return binary cross-entropy and number of correct predictions, summed over the batch."""
        logits = model(batch.inputs)
        loss = F.binary_cross_entropy_with_logits(logits, batch.success.float(), reduction="sum")
        right = ((logits > 0) == batch.success).sum()
        return loss, {"classifier/loss": loss.detach(), "classifier/accuracy": right.detach()}

    def predict(self, model: Any, inputs: Inputs) -> Tensor:
        """Return the logits of success."""
        return model(inputs)

    def split(self, frames: Frames) -> tuple[Tensor, Tensor]:
        """Return the training rows and the held-out rows, int64. The last episodes are held out.

        Raises UserError if one of the two lacks frames of success or of failure.
        """
        last_learnt = round((1 - self.config.held_out) * (int(frames.episode.max()) + 1)) - 1
        held_out = frames.episode > last_learnt
        rows = (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]
        for part, name in zip(rows, ("for training", "held out"), strict=True):
            successes = int(frames.success[part].sum())
            if successes in (0, len(part)):
                raise UserError(
                    f"{successes} of {len(part)} frames {name} show success, and both classes are needed: "
                    "raise algorithm.demonstrations.episodes"
                )
        return rows


def balanced(success: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Draw ``size`` rows, int64, with replacement; every other one is of success."""
    kinds = [success.nonzero()[:, 0], (~success).nonzero()[:, 0]]
    of_success, others = (
        rows[torch.randint(len(rows), (size,), generator=generator)] for rows in kinds
    )
    return torch.where(torch.arange(size) % 2 == 0, of_success, others)

"""A success classifier for rewards, learnt from labelled frames, as many of success as of the rest (HIL-SERL, arXiv 2410.21845)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf_vla.algorithms.augmentation import shift_images
from rlinf_vla.algorithms.sft import DemonstrationConfig, StepFlow, warmup_cosine
from rlinf_vla.ranges import CountOrZero, LearningRate, Name, Positive, Probability, Range, Size
from rlinf_vla.types import Inputs, UserError


@dataclass
class ClassifierConfig:
    """Recipe node ``algorithm``."""

    name: Name = "classifier"
    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    """Whose frames are looked at: the scripted expert's under noise, which makes it fail too, or a dataset's that has ``next.success``."""
    held_out: Annotated[float, Range(0, 1, above=True, below=True)] = 0.2
    """Share of the episodes that is not learnt from, to measure with."""
    batch_size: Size = 64
    shift: Annotated[int, Range(0, 1024)] = 4
    """Images are moved by up to so many pixels in each direction; 0: not."""
    learning_rate: LearningRate = 1e-3
    warmup_steps: CountOrZero = 20
    weight_decay: Probability = 0.01
    max_grad_norm: Positive = 1.0


@dataclass(frozen=True)
class Frames:
    """``N`` prepared observations, bool ``[N]`` whether they show success, and int64 ``[N]`` of which episode they are."""

    inputs: Inputs
    success: Tensor
    episode: Tensor

    @property
    def counts(self) -> Tensor:
        return torch.ones_like(self.success)

    def __len__(self) -> int:
        return len(self.success)

    def __getitem__(self, index: Any) -> Frames:
        return Frames({name: value[index] for name, value in self.inputs.items()}, self.success[index], self.episode[index])


class Flow(StepFlow, Protocol):
    """The operations that learning a classifier is made of."""

    def label(self, config: DemonstrationConfig) -> Frames:
        """All frames; played or read in a run's first iteration."""

    def classify(self, batch: Frames, rate: float) -> None:
        """An optimiser step, at this share of the learning rate."""


class SuccessLearning:
    def __init__(self, config: ClassifierConfig, iterations: int) -> None:
        self.config, self.iterations = config, iterations

    def iteration(self, flow: Flow) -> None:
        frames, generator = flow.label(self.config.demonstrations), flow.generator()
        learnt, _ = self.split(frames)
        batch = frames[learnt[balanced(frames.success[learnt], self.config.batch_size, generator)]]
        batch = Frames(shift_images(batch.inputs, self.config.shift, generator), batch.success, batch.episode)
        flow.classify(batch, warmup_cosine(flow.iteration, self.config.warmup_steps, self.iterations))

    def split(self, frames: Frames) -> tuple[Tensor, Tensor]:
        """int64 rows to learn from, and those held out: whole episodes, the last ones.

        Raises UserError where one of the two lacks frames of either kind.
        """
        last_learnt = round((1 - self.config.held_out) * (int(frames.episode.max()) + 1)) - 1
        held_out = frames.episode > last_learnt
        rows = (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]
        for part, name in zip(rows, ("learnt from", "held out"), strict=True):
            shown = int(frames.success[part].sum())
            if shown in (0, len(part)):
                raise UserError(
                    f"{shown} of {len(part)} frames that are {name} show success, and both kinds are wanted: "
                    "raise algorithm.demonstrations.episodes"
                )
        return rows


def balanced(success: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """int64 ``[size]``: rows drawn with replacement, every other one of success."""
    kinds = [success.nonzero()[:, 0], (~success).nonzero()[:, 0]]
    of_success, others = (rows[torch.randint(len(rows), (size,), generator=generator)] for rows in kinds)
    return torch.where(torch.arange(size) % 2 == 0, of_success, others)


def success_loss(model: Any, batch: Frames) -> tuple[Tensor, dict[str, Tensor]]:
    """Binary cross-entropy, summed over the batch."""
    logits = model(batch.inputs)
    loss = F.binary_cross_entropy_with_logits(logits, batch.success.float(), reduction="sum")
    right = ((logits > 0) == batch.success).sum()
    return loss, {"classifier/loss": loss.detach(), "classifier/accuracy": right.detach()}

"""HG-DAgger: imitate the operator's corrections of the policy's own episodes.

Kelly, Sidrane, Driggs-Campbell and Kochenderfer 2019 (arXiv 1810.02890): the operator takes over
where the policy would fail. Only these steps are labels, and all of them are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch

from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.algorithms.sft import Demonstrations, Imitation, ImitationConfig
from rlinf_vla.config.ranges import Count, LearningRate, Name, Probability
from rlinf_vla.config.recipe import INTERACTIVE


@dataclass
class HGDAggerConfig(ImitationConfig):
    """Recipe node ``algorithm``."""

    family: ClassVar[str] = INTERACTIVE

    name: Name = "hg_dagger"
    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    """Datasets are imitated beside the corrections; without any, the corrections alone."""
    episodes: Count = 4
    """Number of the policy's episodes per iteration, before its updates."""
    updates: Count = 50
    """Optimiser steps per iteration; none while there is neither dataset nor correction."""
    correction_share: Probability = 0.5
    """Fraction of every batch drawn from the corrections, if there are any and a dataset."""
    learning_rate: LearningRate = 3e-4
    """Constant: how many steps a run takes is not known, as iterations without data take none."""


class Flow(Protocol):
    """The operations from which an iteration is composed; a runtime implements them."""

    iteration: int

    def generator(self) -> torch.Generator:
        """Return this iteration's random number generator, identical in a resumed run."""

    def demonstrate(self, config: DemonstrationConfig, augmented: bool) -> Demonstrations:
        """Return the dataset's demonstrations. ``augmented``: see ``sft.Flow``."""

    def correct(self, episodes: int) -> Demonstrations | None:
        """Run the policy's episodes; return the operator's steps of all iterations so far, None
        without any."""

    def aggregate(self, batches: Sequence[Demonstrations]) -> None:
        """Take an optimiser step on each batch."""

    def publish(self) -> None: ...


class HGDAgger(Imitation):
    """Run episodes under the operator's eyes, then imitate demonstrations and corrections."""

    Config = HGDAggerConfig
    config: HGDAggerConfig

    def iteration(self, flow: Flow) -> None:
        config = self.config
        demonstrations = None
        if config.demonstrations.datasets:
            demonstrations = flow.demonstrate(config.demonstrations, self.augments)
        corrections = flow.correct(config.episodes)
        if demonstrations is not None or corrections is not None:
            flow.aggregate(self.batches(demonstrations, corrections, flow))
        flow.publish()

    def batches(
        self, demonstrations: Demonstrations | None, corrections: Demonstrations | None, flow: Flow
    ) -> list[Demonstrations]:
        """Draw the batches of an iteration: ``updates`` of ``batch_size`` rows."""
        config = self.config
        generator = flow.generator()
        size = config.batch_size
        if demonstrations is None or corrections is None:
            parts = [(demonstrations or corrections, size)]
        else:
            corrected = round(config.correction_share * size)
            parts = [(corrections, corrected), (demonstrations, size - corrected)]
        batches = []
        for update in range(config.updates):
            drawn = [
                part.draw(count, generator) for part, count in parts if part is not None and count
            ]
            first = (flow.iteration * config.updates + update) * size
            batches.append(replace(Demonstrations.cat(drawn), draws=first + torch.arange(size)))
        return batches

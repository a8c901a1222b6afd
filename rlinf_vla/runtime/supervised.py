"""Flows of supervised training; an iteration is one optimiser step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.algorithms.classifier import Frames, success_loss
from rlinf_vla.algorithms.sft import Demonstrations, imitation_loss
from rlinf_vla.core.protocols import Learner, Policy, RewardModel, VectorEnv
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.demonstrations import collect_demonstrations, labelled_frames
from rlinf_vla.rollout.noise import imitation_noise
from rlinf_vla.runtime.base import BaseFlow, Threads
from rlinf_vla.training.trainer import Trainer


class ImitationFlow(BaseFlow):
    """Base of flows of imitation."""

    metrics_every = 10

    def __init__(self, settings: Settings, say: Callable[[str], None] = lambda text: None) -> None:
        super().__init__(settings)
        self.say = say
        self._demonstrations: Demonstrations | None = None

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.settings.run_seed * 1_000_003 + self.iteration)

    def demonstrate(self, config: DemonstrationConfig) -> Demonstrations:
        if self._demonstrations is None:
            self._demonstrations, success = self.collect_demonstrations(config)
            succeeded = "" if success is None else f"; {100 * success:.0f} % succeeded"
            self.say(f"{_source(config)}: {len(self._demonstrations)} states{succeeded}")
        return self._demonstrations

    def imitate(self, batch: Demonstrations, rate: float) -> None:
        self.log(self.imitation_step(batch, rate))
        self.publish()

    def collect_demonstrations(self, config: DemonstrationConfig) -> tuple[Demonstrations, float | None]:
        """Return the demonstrations, and the share of successful episodes if it is known."""
        raise NotImplementedError

    def imitation_step(self, batch: Demonstrations, rate: float) -> dict[str, float]:
        """Take one optimiser step with ``rate`` times the learning rate; return its metrics."""
        raise NotImplementedError


def imitation_step(trainer: Trainer, run_seed: int, batch: Demonstrations, rate: float) -> dict[str, float]:
    """Take one optimiser step on the imitation loss of ``batch``."""
    loss = partial(imitation_loss, noise=partial(imitation_noise, run_seed))
    return trainer.step(batch, loss, rate)


class SupervisedFlow(ImitationFlow):
    """Flow of imitation and reward classification in one process."""

    def __init__(
        self,
        learner: Learner,
        groups: Sequence[VectorEnv],
        trainer: Trainer,
        settings: Settings,
        update_threads: Threads = nullcontext,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(settings, say)
        self.learner, self.groups, self.trainer, self.update_threads = learner, groups, trainer, update_threads
        self._frames: Frames | None = None

    def collect_demonstrations(self, config: DemonstrationConfig) -> tuple[Demonstrations, float | None]:
        assert isinstance(self.learner, Policy)
        with self.update_threads():
            return collect_demonstrations(
                self.learner, self.groups, config, self.settings.run_seed, partial(self.progress, "demonstrations")
            )

    def imitation_step(self, batch: Demonstrations, rate: float) -> dict[str, float]:
        with self.update_threads():
            return imitation_step(self.trainer, self.settings.run_seed, batch, rate)

    def label(self, config: DemonstrationConfig) -> Frames:
        if self._frames is None:
            assert isinstance(self.learner, RewardModel)
            progress = partial(self.progress, "frames")
            with self.update_threads():
                self._frames = labelled_frames(self.learner, self.groups, config, self.settings.run_seed, progress)
            self.say(f"{_source(config)}: {len(self._frames)} frames, {int(self._frames.success.sum())} of them labelled success")
        return self._frames

    def classify(self, batch: Frames, rate: float) -> None:
        with self.update_threads():
            self.log(self.trainer.step(batch, success_loss, rate))
        self.publish()


def _source(config: DemonstrationConfig) -> str:
    return config.dataset or f"{config.episodes} episodes of the scripted expert with action noise"

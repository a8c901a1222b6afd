"""Flow of supervised training in one process; an iteration is one optimiser step."""

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


class SupervisedFlow(BaseFlow):
    """Flow of imitation and reward classification."""

    metrics_every = 10

    def __init__(
        self,
        learner: Learner,
        groups: Sequence[VectorEnv],
        trainer: Trainer,
        settings: Settings,
        update_threads: Threads = nullcontext,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(settings)
        self.learner, self.groups, self.trainer, self.update_threads, self.say = learner, groups, trainer, update_threads, say
        self._demonstrations: Demonstrations | None = None
        self._frames: Frames | None = None

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.settings.run_seed * 1_000_003 + self.iteration)

    def demonstrate(self, config: DemonstrationConfig) -> Demonstrations:
        if self._demonstrations is None:
            assert isinstance(self.learner, Policy)
            progress = partial(self.progress, "demonstrations")
            with self.update_threads():
                self._demonstrations, success = collect_demonstrations(self.learner, self.groups, config, self.settings.run_seed, progress)
            succeeded = "" if success is None else f"; {100 * success:.0f} % succeeded"
            self.say(f"{_source(config)}: {len(self._demonstrations)} states{succeeded}")
        return self._demonstrations

    def imitate(self, batch: Demonstrations, rate: float) -> None:
        loss = partial(imitation_loss, noise=partial(imitation_noise, self.settings.run_seed))
        with self.update_threads():
            self.log(self.trainer.step(batch, loss, rate))
        self.publish()

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

"""Flow of supervised training in one process; an iteration is one optimiser step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from rlinf_vla.algorithms.classifier import Frames, success_loss
from rlinf_vla.algorithms.sft import DemonstrationConfig, Demonstrations, imitation_loss
from rlinf_vla.core.protocols import Learner, Policy, RewardModel, VectorEnv
from rlinf_vla.rollout.demonstrations import collect_demonstrations, imitation_noise, labelled_frames
from rlinf_vla.training.trainer import Trainer


class SupervisedFlow:
    """Flow of imitation and reward classification.

    Per iteration: ``begin(i)``, ``algorithm.iteration(flow)``, ``metrics``.
    """

    def __init__(
        self,
        learner: Learner,
        groups: Sequence[VectorEnv],
        trainer: Trainer,
        run_seed: int,
        progress: Callable[[str, float], None] = lambda stage, fraction: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.learner, self.groups, self.trainer, self.run_seed = learner, groups, trainer, run_seed
        self.progress, self.say = progress, say
        self.iteration = 0
        self.metrics: dict[str, float] = {}
        self._demonstrations: Demonstrations | None = None
        self._frames: Frames | None = None

    def begin(self, iteration: int) -> None:
        self.iteration, self.metrics = iteration, {}

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.run_seed * 1_000_003 + self.iteration)

    def demonstrate(self, config: DemonstrationConfig) -> Demonstrations:
        if self._demonstrations is None:
            assert isinstance(self.learner, Policy)
            progress = partial(self.progress, "demonstrations")
            self._demonstrations, success = collect_demonstrations(self.learner, self.groups, config, self.run_seed, progress)
            succeeded = "" if success is None else f"; {100 * success:.0f} % succeeded"
            self.say(f"{_source(config)}: {len(self._demonstrations)} states{succeeded}")
        return self._demonstrations

    def imitate(self, batch: Demonstrations, rate: float) -> None:
        loss = partial(imitation_loss, noise=partial(imitation_noise, self.run_seed))
        self.metrics = self.trainer.step(batch, loss, rate) | {"sft/learning_rate": rate * self.trainer.settings.learning_rate}

    def label(self, config: DemonstrationConfig) -> Frames:
        if self._frames is None:
            assert isinstance(self.learner, RewardModel)
            self._frames = labelled_frames(self.learner, self.groups, config, self.run_seed, partial(self.progress, "frames"))
            self.say(f"{_source(config)}: {len(self._frames)} frames, {int(self._frames.success.sum())} of them labelled success")
        return self._frames

    def classify(self, batch: Frames, rate: float) -> None:
        self.metrics = self.trainer.step(batch, success_loss, rate)


def _source(config: DemonstrationConfig) -> str:
    return config.dataset or f"{config.episodes} episodes of the scripted expert with action noise"

"""Flows of supervised training; an iteration is one optimiser step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.algorithms.classifier import Frames, success_loss
from rlinf_vla.algorithms.sft import Demonstrations, imitation_loss
from rlinf_vla.core.devices import device_of
from rlinf_vla.core.protocols import Learner, Policy, RewardModel, VectorEnv
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.demonstrations import collect_demonstrations, labelled_frames
from rlinf_vla.rollout.noise import imitation_noise
from rlinf_vla.runtime.base import BaseFlow, Threads
from rlinf_vla.training.ranks import map_rows
from rlinf_vla.training.trainer import Trainer


class SupervisedFlow(BaseFlow):
    """Base of flows of imitation, and of the training of reward classifiers."""

    metrics_every = 10

    def __init__(self, settings: Settings, say: Callable[[str], None] = lambda text: None) -> None:
        super().__init__(settings)
        self.say = say
        self._demonstrations: Demonstrations | None = None
        self._frames: Frames | None = None

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.settings.run_seed * 1_000_003 + self.iteration)

    def demonstrate(self, config: DemonstrationConfig) -> Demonstrations:
        if self._demonstrations is None:
            self._demonstrations, success = self.collect_demonstrations(config)
            succeeded = "" if success is None else f"; {100 * success:.0f} % succeeded"
            self.say(f"{_source(config)}: {len(self._demonstrations)} states{succeeded}")
        return self._demonstrations

    def label(self, config: DemonstrationConfig) -> Frames:
        if self._frames is None:
            self._frames = self.collect_frames(config)
            self.say(
                f"{_source(config)}: {len(self._frames)} frames, {int(self._frames.success.sum())} of them labelled success"
            )
        return self._frames

    def imitate(self, batch: Demonstrations, rate: float) -> None:
        self.log(self.step(batch, rate))
        self.publish()

    def classify(self, batch: Frames, rate: float) -> None:
        self.log(self.step(batch, rate))
        self.publish()

    def collect_demonstrations(
        self, config: DemonstrationConfig
    ) -> tuple[Demonstrations, float | None]:
        """Return the demonstrations, and the share of successful episodes if it is known."""
        raise NotImplementedError

    def collect_frames(self, config: DemonstrationConfig) -> Frames:
        """Return the labelled frames."""
        raise NotImplementedError

    def step(self, batch: Demonstrations | Frames, rate: float) -> dict[str, float]:
        """Take one optimiser step with ``rate`` times the learning rate; return its metrics."""
        raise NotImplementedError

    def success_logits(self, frames: Frames) -> Tensor:
        """Return the reward model's logits of success, float32 ``[N]``, on the CPU."""
        raise NotImplementedError


def supervised_step(
    trainer: Trainer, run_seed: int, batch: Demonstrations | Frames, rate: float
) -> dict[str, float]:
    """Take one optimiser step: imitate demonstrations, or classify frames. Return its metrics."""
    loss = (
        success_loss
        if isinstance(batch, Frames)
        else partial(imitation_loss, noise=partial(imitation_noise, run_seed))
    )
    return trainer.step(batch, loss, rate)


@torch.no_grad()
def success_logits(trainer: Trainer, frames: Frames) -> Tensor:
    """See ``SupervisedFlow.success_logits``; the trainer ranks share the work."""
    model = trainer.policy
    return map_rows(
        lambda part: model(part.inputs), frames, trainer.micro_batch_size, device_of(model)
    )


class LocalSupervisedFlow(SupervisedFlow):
    """Supervised training in one process."""

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
        self.learner = learner
        self.groups = groups
        self.trainer = trainer
        self.update_threads = update_threads

    def collect_demonstrations(
        self, config: DemonstrationConfig
    ) -> tuple[Demonstrations, float | None]:
        assert isinstance(self.learner, Policy)
        with self.update_threads():
            return collect_demonstrations(
                self.learner,
                self.groups,
                config,
                self.settings.run_seed,
                partial(self.progress, "demonstrations"),
            )

    def collect_frames(self, config: DemonstrationConfig) -> Frames:
        assert isinstance(self.learner, RewardModel)
        with self.update_threads():
            return labelled_frames(
                self.learner,
                self.groups,
                config,
                self.settings.run_seed,
                partial(self.progress, "frames"),
            )

    def step(self, batch: Demonstrations | Frames, rate: float) -> dict[str, float]:
        with self.update_threads():
            return supervised_step(self.trainer, self.settings.run_seed, batch, rate)

    def success_logits(self, frames: Frames) -> Tensor:
        with self.update_threads():
            return success_logits(self.trainer, frames)


def _source(config: DemonstrationConfig) -> str:
    return config.dataset or f"{config.episodes} episodes of the scripted expert with action noise"

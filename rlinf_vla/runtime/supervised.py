"""The flow of supervised training; an iteration is one optimiser step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.algorithms.classifier import Frames
from rlinf_vla.algorithms.sft import Demonstrations, Draws, Supervised
from rlinf_vla.algorithms.value import Returns
from rlinf_vla.core.devices import device_of
from rlinf_vla.core.types import Batched
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.evaluation_episodes import EpisodeResult
from rlinf_vla.rollout.noise import augmentation_noise, imitation_noise
from rlinf_vla.runtime.base import BaseFlow
from rlinf_vla.runtime.workers.base import Workers
from rlinf_vla.runtime.workers.rollout import Weights, evaluate_on
from rlinf_vla.training.ranks import map_rows
from rlinf_vla.training.trainer import Trainer


class SupervisedFlow(BaseFlow):
    """Flow of imitation, and of the training of reward classifiers and models of values."""

    metrics_every = 10

    def __init__(
        self,
        workers: Workers,
        settings: Settings,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(settings)
        self.rollouts = workers.rollouts
        self.trainers = workers.trainers
        self.say = say
        self._publisher = workers.trainers.publisher(workers.rollouts)
        self._sent: Weights | None = None
        self._demonstrations: Demonstrations | None = None
        self._frames: Frames | None = None
        self._returns: tuple[Returns, dict[str, int]] | None = None

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.settings.run_seed * 1_000_003 + self.iteration)

    def demonstrate(self, config: DemonstrationConfig, augmented: bool = False) -> Demonstrations:
        if self._demonstrations is None:
            self._demonstrations, success = self.collect_demonstrations(config, augmented)
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

    def returns(
        self, config: DemonstrationConfig, failure: float
    ) -> tuple[Returns, dict[str, int]]:
        if self._returns is None:
            with self.rollouts.heard(partial(self.progress, "frames")):
                self._returns = self.rollouts.call("returns", config, failure)[0]
            frames = self._returns[0]
            self.say(
                f"{_source(config)}: {len(frames)} frames of {int(frames.episode.max()) + 1} episodes"
            )
        return self._returns

    def fit(self, batch: Batched, rate: float) -> None:
        """Take one optimiser step with ``rate`` times the learning rate."""
        self.log(self.step(batch, rate))
        self.publish()

    def collect_demonstrations(
        self, config: DemonstrationConfig, augmented: bool
    ) -> tuple[Demonstrations, float | None]:
        """Return the demonstrations, and the share of successful episodes if it is known."""
        with self.rollouts.heard(partial(self.progress, "demonstrations")):
            ((demonstrations, success),) = self.rollouts.call("demonstrate", config, augmented)
        return demonstrations, success

    def collect_frames(self, config: DemonstrationConfig) -> Frames:
        """Return the labelled frames."""
        with self.rollouts.heard(partial(self.progress, "frames")):
            frames: Frames = self.rollouts.call("label", config)[0]
        return frames

    def step(self, batch: Batched, rate: float) -> dict[str, float]:
        """Take one optimiser step with ``rate`` times the learning rate; return its metrics.

        Every rank gets the whole batch, and computes its rows (``training/ranks.py``)."""
        metrics: dict[str, float] = self.trainers.call("step", self.trainers.put(batch), rate)[0][0]
        return metrics

    def predictions(self, frames: Frames | Returns) -> Tensor:
        """Return what a model that does not act predicts, float32 ``[N]``, on the CPU."""
        predicted: Tensor = self.trainers.call("predictions", self.trainers.put(frames))[0][0]
        return predicted

    def evaluate(
        self,
        episodes: int,
        size: int,
        temperature: float,
        filmed: int,
        progress: Callable[[float], None],
        probe: str | None,
    ) -> list[EpisodeResult]:
        """Evaluate the current policy on the first ``episodes``, ``size`` in a call of a worker."""
        if self._sent is None or self._sent.version != self.policy_version:
            self._sent, _ = self._publisher.publish(self.policy_version)
        return evaluate_on(
            self.rollouts, self._sent, size, episodes, temperature, filmed, progress, probe
        )

    def will_leave(self) -> bool:
        return bool(self.trainers.will_leave())


def supervised_step(
    trainer: Trainer, algorithm: Any, run_seed: int, batch: Any, rate: float
) -> dict[str, float]:
    """Take one optimiser step with the loss of ``algorithm``; return its metrics."""
    draws = Draws(partial(imitation_noise, run_seed), partial(augmentation_noise, run_seed))
    return trainer.step(batch, partial(algorithm.loss, draws=draws), rate)


@torch.no_grad()
def predictions(trainer: Trainer, algorithm: Supervised, frames: Frames | Returns) -> Tensor:
    """See ``SupervisedFlow.predictions``; the trainer ranks share the work."""
    model = trainer.policy
    return map_rows(
        lambda part: algorithm.predict(model, part.inputs),
        frames,
        trainer.micro_batch_size,
        device_of(model),
    )


def _source(config: DemonstrationConfig) -> str:
    datasets = config.datasets.values()
    total = sum(entry.weight for entry in datasets)
    if len(datasets) > 1:
        return ", ".join(
            f"{100 * entry.weight / total:.3g} % {entry.dataset}" for entry in datasets
        )
    expert = f"{config.episodes} episodes of the scripted expert with action noise"
    return next((entry.dataset for entry in datasets), expert)

"""The flow of supervised training; an iteration is one optimiser step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.algorithms.classifier import Frames, success_loss
from rlinf_vla.algorithms.sft import Demonstrations, imitation_loss
from rlinf_vla.core.devices import device_of
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.evaluation_episodes import EpisodeResult
from rlinf_vla.rollout.noise import augmentation_noise, imitation_noise
from rlinf_vla.runtime.base import BaseFlow
from rlinf_vla.runtime.workers.base import Workers
from rlinf_vla.runtime.workers.rollout import Weights, evaluate_on
from rlinf_vla.training.ranks import map_rows
from rlinf_vla.training.trainer import Trainer


class SupervisedFlow(BaseFlow):
    """Flow of imitation, and of the training of reward classifiers."""

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

    def imitate(self, batch: Demonstrations, rate: float) -> None:
        self.log(self.step(batch, rate))
        self.publish()

    def classify(self, batch: Frames, rate: float) -> None:
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

    def step(self, batch: Demonstrations | Frames, rate: float) -> dict[str, float]:
        """Take one optimiser step with ``rate`` times the learning rate; return its metrics.

        Every rank gets the whole batch, and computes its rows (``training/ranks.py``)."""
        metrics: dict[str, float] = self.trainers.call("step", self.trainers.put(batch), rate)[0][0]
        return metrics

    def success_logits(self, frames: Frames) -> Tensor:
        """Return the reward model's logits of success, float32 ``[N]``, on the CPU."""
        logits: Tensor = self.trainers.call("success_logits", self.trainers.put(frames))[0][0]
        return logits

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
    trainer: Trainer,
    run_seed: int,
    batch: Demonstrations | Frames,
    rate: float,
    augmented: bool = False,
) -> dict[str, float]:
    """Take one optimiser step: imitate demonstrations, or classify frames. Return its metrics.

    ``augmented``: augment the images of the demonstrations.
    """
    loss = (
        success_loss
        if isinstance(batch, Frames)
        else partial(
            imitation_loss,
            noise=partial(imitation_noise, run_seed),
            augmentation=partial(augmentation_noise, run_seed) if augmented else None,
        )
    )
    return trainer.step(batch, loss, rate)


@torch.no_grad()
def success_logits(trainer: Trainer, frames: Frames) -> Tensor:
    """See ``SupervisedFlow.success_logits``; the trainer ranks share the work."""
    model = trainer.policy
    return map_rows(
        lambda part: model(part.inputs), frames, trainer.micro_batch_size, device_of(model)
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

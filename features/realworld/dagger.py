"""Flow of HG-DAgger at a robot: episodes with takeovers, then imitation of the corrections."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rlinf_vla.algorithms.sft import Demonstrations
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import Inputs
from rlinf_vla.features.realworld.arm_convention import ArmConvention
from rlinf_vla.features.realworld.client import RobotClient
from rlinf_vla.features.realworld.episode import RobotEpisode
from rlinf_vla.features.realworld.flow import policy_inputs, session_metrics, training_jobs
from rlinf_vla.features.realworld.records import runs
from rlinf_vla.runtime.supervised import SupervisedFlow
from rlinf_vla.runtime.workers.base import Workers
from rlinf_vla.training.trainer import Trainer


class DAggerFlow(SupervisedFlow):
    """The corrections are the run directory's episode files; a resumed run reads them again."""

    metrics_every = 1

    def __init__(
        self, player: RobotClient, episodes: Path, workers: Workers, *arguments: Any
    ) -> None:
        """``episodes``: directory of the episode files. ``workers``: of this process.
        ``arguments``: see the base class."""
        super().__init__(workers, *arguments)
        learner = workers.trainers.worker
        assert isinstance(learner.policy, Policy)
        self.player = player
        self.trainer: Trainer = learner.trainer
        self.policy = learner.policy
        self._episodes = episodes
        self._augmented: bool = learner.algorithm.augments
        self._convention = ArmConvention(self.policy.spec.convention)
        self._corrections: list[tuple[Inputs, Tensor]] = []
        self._read = 0
        """Iterations whose corrections are in ``_corrections``."""

    def correct(self, episodes: int) -> Demonstrations | None:
        for iteration in range(self._read, self.iteration):
            for job in training_jobs(self.settings, iteration, episodes):
                self._corrections += self._corrected(RobotEpisode.read(self._episodes / job.file))
        started = time.perf_counter()
        self.player.share(self.trainer.acting_weights, self.policy_version)
        jobs = training_jobs(self.settings, self.iteration, episodes)
        for job in jobs:
            self.player.begin(job)
        with self.timeline.span("rollout", "robot"):
            played_episodes = [
                self.player.episode(job, partial(self._rolling, index / len(jobs)))
                for index, job in enumerate(jobs)
            ]
        self.changed = True
        for episode in played_episodes:
            self._corrections += self._corrected(episode)
        self._read = self.iteration + 1
        steps = float(sum(map(len, played_episodes)))
        success = sum(
            episode.success and not bool(episode.human.any()) for episode in played_episodes
        ) / len(played_episodes)
        self.log(session_metrics(played_episodes) | self.player.control_metrics())
        self.log(
            {
                "rollout/steps": steps,
                "rollout/success_alone": success,
                "replay/size": float(self._size()),
            }
        )
        self.log_rollout(time.perf_counter() - started, int(steps))
        return (
            Demonstrations.of(self._corrections, self.policy.horizon) if self._corrections else None
        )

    def aggregate(self, batches: Sequence[Demonstrations]) -> None:
        started = time.perf_counter()
        losses = list[float]()
        with self.timeline.span("update", "trainer"):
            for number, batch in enumerate(batches):
                self.progress("update", number / len(batches))
                self.player.attend()
                losses.append(self.step(batch, 1.0)["sft/loss"])
        seconds = time.perf_counter() - started
        self.log(
            {
                "sft/loss": sum(losses) / len(losses),
                "actor/updates": float(len(batches)),
                "timing_s/update": seconds,
            }
        )

    def _corrected(self, episode: RobotEpisode) -> list[tuple[Inputs, Tensor]]:
        """Return inputs and actions of each run of the operator's steps."""
        if not bool(episode.human.any()):
            return []
        inputs = policy_inputs(self.policy, self._convention, episode, self._augmented)
        actions = self._convention.to_policy(episode.action)
        return [
            ({name: value[start:end] for name, value in inputs.items()}, actions[start:end])
            for start, end in runs(episode.human)
        ]

    def _size(self) -> int:
        return sum(len(actions) for _, actions in self._corrections)

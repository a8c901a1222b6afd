"""Off-policy flow at a robot: updates run while the robot plays the next episodes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from rlinf_vla.algorithms.base import EPISODE_COST
from rlinf_vla.algorithms.off_policy import ReplayLearner
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import Policy, prepared
from rlinf_vla.core.transitions import EpisodeRecords
from rlinf_vla.core.types import Episodes, Inputs, Observation
from rlinf_vla.features.realworld.arm_convention import ArmConvention
from rlinf_vla.features.realworld.client import RobotClient
from rlinf_vla.features.realworld.episode import (
    DEMONSTRATION,
    TRAINING,
    Job,
    RobotEpisode,
    episode_inputs,
    first_jobs,
)
from rlinf_vla.features.realworld.records import (
    RecordForm,
    operator_records,
    to_records,
    training_records,
)
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.episodes import DEMONSTRATION_SEEDS, drawn_episodes
from rlinf_vla.rollout.transitions import transition_metrics
from rlinf_vla.runtime.off_policy import ReplayFlow
from rlinf_vla.runtime.workers.base import Workers
from rlinf_vla.runtime.workers.trainer import TrainerWorker

ATTEND_S = 0.2
"""Seconds between two looks at the robot process during updates."""


class OnlineFlow(ReplayFlow):
    """Off-policy flow at a robot.

    During an iteration's updates the robot plays the next one's episodes, with weights that are one
    iteration old.
    """

    def __init__(
        self,
        player: RobotClient,
        iterations: int,
        workers: Workers,
        nice: int = 0,
        scripted: bool = True,
        **options: Any,
    ) -> None:
        """iterations: number of iterations in the run. workers: of this process. nice: added to the
        nice value of updates, because a control loop runs at the same time. scripted: the scene's
        scripted expert demonstrates, not an operator. options: see the base class."""
        super().__init__(workers.trainers, **options)
        learner: TrainerWorker = workers.trainers.worker
        self.trainer = learner.trainer
        self.policy: Policy = learner.policy
        self.player = player
        self.iterations = iterations
        self._scripted = scripted
        policy = self.policy
        self._convention = ArmConvention(policy.spec.convention)
        self._form = RecordForm(
            policy.spec.chunk,
            self._convention,
            self.config.noise_bound is not None,
            self.config.gamma,
        )
        self._begun: dict[int, list[Job]] = {}
        # the nice value applies to this thread and those that it starts, not to the robot process
        self._updates = ThreadPoolExecutor(1, "updates", partial(os.nice, nice))
        self._forgotten = 0
        self._succeeded: int | None = None
        """Successful demonstrations among those of this process; None: it collected none."""

    def publish(self) -> None:
        super().publish()
        self.player.share(self.trainer.acting_weights, self.policy_version)

    def training_episodes(self, count: int, draw: int) -> Episodes:
        return drawn_episodes(self.settings.run_seed, self.iteration, count, draw, 1)

    def collect_transitions(self, episodes: Episodes) -> int:
        """Store ``episodes``, begun during the previous updates, and begin the next ones."""
        started = time.perf_counter()
        jobs = self._jobs(self.iteration)
        with self.timeline.span("wait", "robot"):
            played_episodes = [
                self._episode(job, index, len(jobs)) for index, job in enumerate(jobs)
            ]
        if self.iteration + 1 < self.iterations:
            self._jobs(self.iteration + 1)
        recorded = []
        self.changed = True
        for episode in played_episodes:
            if len(episode):
                inputs = self._inputs(episode)
                for records in training_records(episode, inputs, self._form):
                    recorded.append(records)
                    self.replay.append(records.records)
                for demonstration in operator_records(episode, inputs, self._form):
                    self.demonstrations.append(demonstration.records)
        steps = sum(records.steps for records in recorded)
        self.log(transition_metrics(recorded) if recorded else {})
        self.log(
            session_metrics(played_episodes)
            | self.player.control_metrics()
            | {"rollout/steps": float(steps)}
        )
        self.log_rollout(time.perf_counter() - started, steps)
        return steps

    def update_from_replay(self, updates: int, algorithm: ReplayLearner) -> None:
        running = self._updates.submit(super().update_from_replay, updates, algorithm)
        while not wait([running], ATTEND_S).done:
            self.player.attend()
        running.result()

    def saved(self, states: Sequence[dict[str, Any]]) -> None:
        """Delete episode files that no resumed run would need: they are in the replay buffer."""
        super().saved(states)
        last = min(state["iteration"] for state in states)
        for iteration in range(self._forgotten, last):
            for job in training_jobs(self.settings, iteration, self.config.episodes):
                self.player.forget(job)
        self._forgotten = max(self._forgotten, last)

    def demonstrate(self, episodes: int) -> None:
        super().demonstrate(episodes)
        if self._succeeded is not None:
            self.log({"demonstrations/success": self._succeeded / episodes})

    def show(self, episodes: int) -> list[bool]:
        return super().show(episodes) if self.config.dataset is None else self._show_dataset()

    def _demonstrations(self, episodes: int) -> Iterable[EpisodeRecords]:
        """Yield the successful demonstrations only."""
        jobs = first_jobs(DEMONSTRATION, DEMONSTRATION_SEEDS, episodes, scripted=self._scripted)
        for job in jobs:
            self.player.begin(job)
        succeeded = 0
        for index, job in enumerate(jobs):
            episode = self._episode(job, index, len(jobs))
            if episode.success and len(episode):
                succeeded += 1
                yield to_records(episode, self._inputs(episode), self._form, 0, len(episode))
        if not succeeded:
            raise UserError(f"algorithm.demonstrations={episodes}: none of them succeeded")
        self._succeeded = succeeded

    def _jobs(self, iteration: int) -> list[Job]:
        """Return the jobs of an iteration, and begin them if that has not been done."""
        if iteration not in self._begun:
            self.player.share(self.trainer.acting_weights, self.policy_version)
            self._begun = {iteration: training_jobs(self.settings, iteration, self.config.episodes)}
            for job in self._begun[iteration]:
                self.player.begin(job)
        return self._begun[iteration]

    def _episode(self, job: Job, index: int, count: int) -> RobotEpisode:
        return self.player.episode(job, lambda: self._rolling(index / count))

    def _inputs(self, episode: RobotEpisode) -> Inputs:
        return policy_inputs(self.policy, self._convention, episode)


def training_jobs(settings: Settings, iteration: int, count: int) -> list[Job]:
    """Return the jobs of an iteration with ``count`` episodes."""
    seeds = drawn_episodes(settings.run_seed, iteration, count, 0, 1).seed.tolist()
    return [
        Job(
            TRAINING,
            iteration * count + index,
            seed,
            temperature=settings.temperature,
            weights=iteration,
        )
        for index, seed in enumerate(seeds)
    ]


def policy_inputs(
    policy: Policy, convention: ArmConvention, episode: RobotEpisode, augmented: bool = False
) -> Inputs:
    """Return the policy's inputs of all observations of the episode, ``[N + 1, ...]``.

    ``augmented``: with the images, for ``Policy.augment``; otherwise with what is computed from
    them, if no update changes it.
    """

    def inputs(seen: Observation) -> Inputs:
        found = prepared(policy, convention.seen(seen), augmented)
        return found if augmented else policy.precompute(found)

    return episode_inputs(episode, inputs)


def session_metrics(played: Sequence[RobotEpisode]) -> dict[str, float]:
    """Compute how much the operator, faults and limits acted in these episodes."""
    steps = max(1, sum(map(len, played)))
    interventions = sum(sum(episode.interventions.values()) for episode in played)
    return {
        EPISODE_COST: sum(float(episode.cost.sum()) for episode in played) / max(1, len(played)),
        "rollout/human_share": sum(int(episode.human.sum()) for episode in played) / steps,
        "rollout/faults": float(sum(episode.fault for episode in played)),
        "rollout/safety_interventions_per_step": interventions / steps,
        "rollout/held_share": 1
        - steps / max(steps, sum(int(episode.tick[-1]) for episode in played)),
    }

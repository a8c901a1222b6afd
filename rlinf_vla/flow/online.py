"""SAC's flow where episodes are played at a robot: updates go on while it moves."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from rlinf_vla.flow.off_policy import OffPolicyFlow
from rlinf_vla.flow.runtime import drawn_episodes
from rlinf_vla.rollout.episodes import DEMONSTRATION_SEEDS, numbered_episodes
from rlinf_vla.rollout.from_dataset import dataset_transitions
from rlinf_vla.rollout.robot_episode import DEMONSTRATION, TRAINING, Job, RobotEpisode, prepared, recorded, shown_by_a_person
from rlinf_vla.rollout.transitions import Recorded, transition_metrics
from rlinf_vla.types import Episodes, Inputs, UserError


class Player(Protocol):
    """Plays episodes in their order, somewhere else, at the same time."""

    def begin(self, job: Job) -> None:
        """One that was played before, in an earlier run of this run, is not played again."""

    def episode(self, job: Job, idle: Callable[[], None]) -> RobotEpisode:
        """Waits for one that was begun."""

    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """What the episodes are played with that begin from now on."""

    def forget(self, job: Job) -> None:
        """It will not be asked for again."""


class OnlineFlow(OffPolicyFlow):
    """While an iteration updates, the robot plays the next one's episodes, with weights that are one iteration old."""

    def __init__(
        self, player: Player, iterations: int, nice: int = 0, seconds: float = math.inf, scripted: bool = True, **options: Any
    ) -> None:
        """``iterations``: after which nothing more is played. ``seconds``: after which no iteration begins. ``nice``: of the updates,
        beside which a control loop runs. ``scripted``: the scene's expert demonstrates, not a person."""
        super().__init__(groups=(), **options)
        self.player, self.iterations, self._scripted = player, iterations, scripted
        self._published = -1
        self._begun: dict[int, list[Job]] = {}
        # a thread has a nice value of its own, and so have the threads that it starts; the robot's process keeps ours
        self._updates = ThreadPoolExecutor(1, "updates", partial(os.nice, nice))
        self._forgotten = 0
        self._succeeded: int | None = None
        """Of the demonstrations that were played in this process."""
        self._seconds, self._first = seconds, math.inf
        """When the first iteration began."""

    def begin(self, iteration: int) -> None:
        super().begin(iteration)
        self._first = min(self._first, time.monotonic())

    def enough(self) -> bool:
        return time.monotonic() - self._first >= self._seconds

    def share(self) -> int:
        """The present weights are for the robot's policy, too; returns their version."""
        if self._published != self.policy_version:
            acting = {name: value for name, value in self.trainer.parameters.items() if not name.startswith(_NOT_ACTING)}
            self.player.publish(acting, self.policy_version)
            self._published = self.policy_version
        return self.policy_version

    def publish(self) -> None:
        super().publish()
        self.share()

    def training_episodes(self, count: int, draw: int) -> Episodes:
        return drawn_episodes(self.settings.run_seed, self.iteration, count, draw, 1)

    def collect_transitions(self, episodes: Episodes) -> int:
        """Of ``episodes``, which were begun while the iteration before this one made its updates; then the next ones begin."""
        started = time.perf_counter()
        jobs = self._jobs(self.iteration)
        with self.timeline.span("wait", "robot"):
            played = [self._episode(job, place, len(jobs)) for place, job in enumerate(jobs)]
        if self.iteration + 1 < self.iterations:
            self._jobs(self.iteration + 1)
        found = []
        self.changed = True
        for episode in played:
            if len(episode):
                inputs = self._inputs(episode)
                found.append(recorded(episode, inputs, self.config.gamma))
                self.replay.append(found[-1].records)
                for shown in shown_by_a_person(episode, inputs, self.config.gamma):
                    self.shown.append(shown.records)
        steps = sum(each.steps for each in found)
        self.log(transition_metrics(found) if found else {})
        self.log(_metrics(played) | {"rollout/steps": float(steps)})
        self.log_rollout(time.perf_counter() - started, steps)
        return steps

    def improve(self, updates: int) -> None:
        if len(self.replay):
            self._updates.submit(super().improve, updates).result()

    def saved(self, states: Sequence[dict[str, Any]]) -> None:
        """Episodes that no checkpoint's continuation would ask for are in the replay, and needed no more."""
        super().saved(states)
        last = min(state["iteration"] for state in states)
        for iteration in range(self._forgotten, last):
            for job in self._listed(iteration):
                self.player.forget(job)
        self._forgotten = max(self._forgotten, last)

    def demonstrate(self, episodes: int) -> None:
        super().demonstrate(episodes)
        if self._succeeded is not None:
            self.log({"demonstrations/success": self._succeeded / episodes})

    def _demonstrations(self, episodes: int) -> Iterable[Recorded]:
        """Those that failed show nothing."""
        if self.config.dataset is not None:
            yield from dataset_transitions(self.policy, self.config)
            return
        listed = numbered_episodes(DEMONSTRATION_SEEDS, 0, episodes, 1)
        jobs = [Job(DEMONSTRATION, number, seed, scripted=self._scripted) for number, seed in enumerate(listed.seed.tolist())]
        for job in jobs:
            self.player.begin(job)
        succeeded = 0
        for place, job in enumerate(jobs):
            episode = self._episode(job, place, len(jobs))
            if episode.success and len(episode):
                succeeded += 1
                yield recorded(episode, self._inputs(episode), self.config.gamma)
        if not succeeded:
            raise UserError(f"algorithm.demonstrations={episodes}: none of them succeeded")
        self._succeeded = succeeded

    def _jobs(self, iteration: int) -> list[Job]:
        """Those of an iteration, begun."""
        if iteration not in self._begun:
            self.share()
            self._begun = {iteration: self._listed(iteration)}
            for job in self._begun[iteration]:
                self.player.begin(job)
        return self._begun[iteration]

    def _listed(self, iteration: int) -> list[Job]:
        count, temperature = self.config.episodes, self.settings.temperature
        seeds = drawn_episodes(self.settings.run_seed, iteration, count, 0, 1).seed.tolist()
        return [
            Job(TRAINING, iteration * count + place, seed, temperature=temperature, weights=iteration) for place, seed in enumerate(seeds)
        ]

    def _episode(self, job: Job, place: int, count: int) -> RobotEpisode:
        return self.player.episode(job, lambda: self._rolling(place / count))

    def _inputs(self, episode: RobotEpisode) -> Inputs:
        device = next(self.policy.parameters()).device
        return prepared(episode, lambda seen: self.policy.fix(self.policy.prepare(seen)), device)


_NOT_ACTING = ("value_head.", "log_alpha")


def _metrics(played: Sequence[RobotEpisode]) -> dict[str, float]:
    steps = max(1, sum(map(len, played)))
    interventions = sum(sum(each.interventions.values()) for each in played)
    return {
        "rollout/human_share": sum(int(each.human.sum()) for each in played) / steps,
        "rollout/faults": float(sum(each.fault for each in played)),
        "rollout/safety_interventions_per_step": interventions / steps,
        "rollout/held_share": 1 - steps / max(steps, sum(int(each.tick[-1]) for each in played)),
    }

"""The flows of off-policy algorithms: workers fill a replay buffer, from which trainers learn."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlinf_vla.algorithms.advantages import chunk_rewards
from rlinf_vla.algorithms.off_policy import ReplayConfig, ReplayLearner
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.devices import device_of
from rlinf_vla.core.transitions import ACTED, EpisodeRecords
from rlinf_vla.core.types import Episodes, Tensors
from rlinf_vla.data.dataset_source import require_same_control_rate
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.collector import call_metrics
from rlinf_vla.rollout.episodes import DEMONSTRATION_SEEDS, drawn_episodes, numbered_episodes
from rlinf_vla.rollout.evaluation_episodes import EpisodeResult
from rlinf_vla.rollout.transitions import ChunkRewards, faults_of_records, transition_metrics
from rlinf_vla.runtime.base import BaseFlow
from rlinf_vla.runtime.workers.base import WorkerInfo, Workers, add_spans
from rlinf_vla.runtime.workers.rollout import evaluate_on
from rlinf_vla.runtime.workers.shards import Packed, parts
from rlinf_vla.training.ranks import rank, summed, world_size
from rlinf_vla.training.replay import AnyReplay, Replay, ShardedReplay, sample_mixed
from rlinf_vla.training.trainer import Trainer

EVERYTHING = 1 << 40
RANKS = "replay_ranks"
"""Key of a checkpoint's state: the number of trainer ranks that divide the replay, if several."""


class TrainersReplay:
    """One of the replay buffers of the trainer ranks."""

    def __init__(self, trainers: Any, number: int, size: tuple[int, int]) -> None:
        self._trainers = trainers
        self._number = number
        self.total, self._length = size

    def __len__(self) -> int:
        return self._length

    def append(self, episode: Tensors) -> None:
        stored = self._trainers.put(Packed.of(episode))
        acted = Packed.of({ACTED: episode[ACTED]})
        # a reference within a list is not fetched until it is asked for
        self.set_size(self._trainers.call("append", self._number, acted, [stored])[0][0])

    def set_size(self, size: tuple[int, int]) -> None:
        self.total, self._length = size

    def flush(self) -> None:
        self._trainers.call("flush", self._number)

    def forget(self, total: int) -> None:
        self._trainers.call("forget_records", self._number, total)


def open_replays(
    directory: Path, config: ReplayConfig, state: dict[str, Any]
) -> tuple[AnyReplay, AnyReplay]:
    """Open the replay buffers of online data and of demonstrations, or this rank's part of them.

    state: from ``ReplayFlow.save`` before a resume, else empty. Raises UserError if it is of
    another number of trainer ranks.
    """
    ranks = world_size()
    before = state.get(RANKS, 1)
    if state and ranks != before:
        raise UserError(
            f"the replay buffers of the checkpoint are divided among {before} trainer rank{'s' * (before > 1)}, not {ranks}: "
            f"resume with cluster.trainer_ranks={before}, or start again with resume=never"
        )

    def opened(name: str, capacity: int, total: int) -> AnyReplay:
        if ranks == 1:
            return Replay(directory / name, capacity, total)
        return ShardedReplay(directory / name, rank(), ranks, capacity, total)

    online = opened("online", config.replay_capacity, state.get("replay", 0))
    return online, opened("demonstrations", EVERYTHING, state.get("demonstrations", 0))


def append_all(store: AnyReplay | TrainersReplay, episodes: Iterable[EpisodeRecords]) -> list[bool]:
    """Add ``episodes`` to ``store`` one by one; return which of them succeeded."""
    successes = []
    for episode in episodes:
        store.append(episode.records)
        successes.append(episode.success)
    return successes


def learn_from_replay(
    trainer: Trainer,
    algorithm: ReplayLearner,
    replays: tuple[AnyReplay, AnyReplay],
    updates: int,
    run_seed: int,
    iteration: int,
    progress: Callable[[float], None] = lambda fraction: None,
) -> dict[str, float]:
    """Make an iteration's ``updates`` on batches from ``replays``; return the mean metrics.

    All trainer ranks must call it.
    """
    sums, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    config = algorithm.config
    demonstrations = replays[1]
    size = config.batch_size
    share = algorithm.demonstrated(iteration) if len(demonstrations) else 0.0
    if share == 1 and not demonstrations.on_all_ranks:
        raise UserError(
            f"cluster.trainer_ranks={world_size()}: there are fewer demonstrations than ranks, and each rank needs one while "
            "nothing is collected: use fewer ranks or more demonstrations"
        )
    for index in range(updates):
        # random numbers depend only on the update's index: a resumed run draws the same
        seed = ((run_seed * 1_000_003 + iteration) << 20) + index
        generator = torch.Generator().manual_seed(seed % (1 << 63))
        batch = algorithm.charged(sample_mixed(replays, [1 - share, share], size, generator))
        imitated = partial(sample_mixed, replays, [0.0, 1.0], size, generator)
        for name, value in algorithm.step(
            trainer, batch, generator, iteration, index, imitated
        ).items():
            sums[name] += value
            counts[name] += 1
        progress((index + 1) / updates)
    device = device_of(trainer.policy)
    totals = summed(
        {name: torch.tensor(value, dtype=torch.float64).to(device) for name, value in sums.items()}
    )
    return {name: value / counts[name] for name, value in totals.items()}


class ReplayFlow(BaseFlow):
    """Base of off-policy flows: replay of online data and of demonstrations, and their learner."""

    def __init__(
        self,
        trainers: Any,
        settings: Settings,
        config: Any,
        directory: Path,
        state: dict[str, Any],
        instructions: tuple[str, ...],
    ) -> None:
        """``trainers``: ``LocalTrainers`` or ``Trainers`` of ``LearnerWorker``s. ``config``: a
        ``ReplayConfig``, with the keys that the algorithm's operations read. ``directory``,
        ``state``: see ``open_replays``. ``instructions``: all that episodes can have."""
        super().__init__(settings)
        self.config = config
        self.trainers = trainers
        sizes = trainers.call("open_replays", directory, state, instructions)[0][0]
        self.replay, self.demonstrations = (
            TrainersReplay(trainers, number, size) for number, size in enumerate(sizes)
        )
        self._showing = False
        """Whether demonstrations are being collected; a run resumed then collects them anew."""

    def demonstrate(self, episodes: int) -> None:
        if self.demonstrations.total:
            return
        self._showing = True
        successes = self.show(episodes)
        self._showing = False
        if not successes:
            raise UserError(
                f"algorithm.dataset={self.config.dataset}: none of its episodes has a usable transition"
            )
        self.log({"demonstrations/success": sum(successes) / len(successes)})

    def show(self, episodes: int) -> list[bool]:
        """Add demonstrations to the replay buffer; return which of them succeeded."""
        return append_all(self.demonstrations, self._demonstrations(episodes))

    def _show_dataset(self) -> list[bool]:
        """Add the episodes of ``config.dataset``, which the trainers read."""
        size, successes = self.trainers.call("append_dataset", self.config)[0][0]
        self.demonstrations.set_size(size)
        return list(successes)

    def _demonstrations(self, episodes: int) -> Iterable[EpisodeRecords]:
        raise NotImplementedError

    def update_from_replay(self, updates: int, algorithm: ReplayLearner) -> None:
        offline = algorithm.demonstrated(self.iteration) == 1
        if not len(self.demonstrations if offline else self.replay):
            return  # every episode was cut before its first step
        self.changed = True
        started = time.perf_counter()
        with (
            self.timeline.span("update", "trainer"),
            self.trainers.heard(partial(self.progress, "update")),
        ):
            metrics = self.trainers.call("learn", updates, self.iteration, algorithm.state())[0][0]
        self.log(metrics)
        self.log(
            {
                "timing_s/update": time.perf_counter() - started,
                "actor/updates": float(updates),
                "replay/size": float(len(self.replay)),
            }
        )

    def will_leave(self) -> bool:
        return bool(self.trainers.will_leave())

    def save(self) -> dict[str, Any]:
        for store in (self.replay, self.demonstrations):
            store.flush()
        ranks = len(self.trainers.actors)
        return (
            super().save()
            | {
                "replay": self.replay.total,
                "demonstrations": 0 if self._showing else self.demonstrations.total,
            }
            | ({RANKS: ranks} if ranks > 1 else {})
        )

    def saved(self, states: Sequence[dict[str, Any]]) -> None:
        self.replay.forget(min(state["replay"] for state in states))


class OffPolicyFlow(ReplayFlow):
    """Off-policy flow with simulators: rollout workers fill the replay of the trainers."""

    def __init__(
        self,
        workers: Workers,
        share: int,
        settings: Settings,
        config: Any,
        directory: Path,
        state: dict[str, Any],
    ) -> None:
        """``share``: episodes per call of a worker. For the others see ``ReplayFlow``."""
        self.rollouts = workers.rollouts
        worker: WorkerInfo = self.rollouts.call("worker_info")[0]
        assert worker.env is not None and worker.policy is not None
        self.env = worker.env
        super().__init__(
            workers.trainers, settings, config, directory, state, self.env.instructions
        )
        self.share = share
        self._publisher = workers.trainers.publisher(self.rollouts)
        self._version = 0
        self._send_weights()

    def _send_weights(self) -> None:
        self._version += 1
        self.weights, self._sent = self._publisher.publish(self._version)

    def show(self, episodes: int) -> list[bool]:
        if self.config.dataset is None:
            return super().show(episodes)
        require_same_control_rate(self.config.dataset, [self.env])
        return self._show_dataset()

    def _demonstrations(self, episodes: int) -> Iterable[EpisodeRecords]:
        listed = numbered_episodes(DEMONSTRATION_SEEDS, 0, episodes, len(self.env.tasks))
        rewarded = (self._rewards(), True)
        return self._collected(listed, "collect_transitions", rewarded, lambda fraction: None)[0]

    def training_episodes(self, count: int, draw: int) -> Episodes:
        return drawn_episodes(
            self.settings.run_seed, self.iteration, count, draw, len(self.env.tasks)
        )

    def collect_transitions(self, episodes: Episodes) -> int:
        return self._stored(episodes, "collect_transitions", (self._rewards(), False))

    def visit(self, episodes: Episodes, beta: float | None) -> None:
        self._stored(episodes, "visit", (beta,))

    def _rewards(self) -> ChunkRewards:
        return partial(chunk_rewards, gamma=self.config.gamma, unit=self.config.gamma_unit)

    def _stored(self, episodes: Episodes, method: str, arguments: tuple[Any, ...]) -> int:
        """Run ``episodes``, see ``_collected``; store them and return their control steps."""
        started = time.perf_counter()
        collected, counts = self._collected(episodes, method, arguments, self._rolling)
        self.changed = True
        for episode in collected:
            self.replay.append(episode.records)
        self.log_faults(faults_of_records(episodes, collected, self.env.tasks))
        steps = sum(episode.steps for episode in collected)
        self.log(transition_metrics(collected) | call_metrics(counts))
        self.log({"rollout/steps": float(steps)})
        self.log_rollout(time.perf_counter() - started, steps)
        return steps

    def _collected(
        self,
        episodes: Episodes,
        method: str,
        arguments: tuple[Any, ...],
        progress: Callable[[float], None],
    ) -> tuple[list[EpisodeRecords], list[dict[str, int]]]:
        """Run ``episodes`` to their end.

        ``method``, ``arguments``: of the rollout workers. Returns their records, in their order,
        and the totals of the workers' ``CallCounts``.
        """
        shards = [episodes] if self.rollouts.inline else parts(episodes, self.share)
        works = [(self.weights, shard, *arguments) for shard in shards]
        collected = []
        counts = []
        for records, spans, totals in self.rollouts.map(method, works, progress):
            counts.append(totals)
            collected += [
                EpisodeRecords(packed.tensors(), *outcome) for packed, *outcome in records
            ]
            add_spans(self.timeline, spans)
        return collected, counts

    def publish(self) -> None:
        super().publish()
        self._send_weights()
        if not self.rollouts.inline:
            lost, recovery_s = self.rollouts.news()
            self.log({"faults/rollout": float(lost), "faults/recovery_s": recovery_s, **self._sent})

    def evaluate(
        self,
        episodes: int,
        temperature: float,
        filmed: int,
        progress: Callable[[float], None],
        probe: str | None,
    ) -> list[EpisodeResult]:
        """Run the first ``episodes`` evaluation episodes; record frames of the first ``filmed``."""
        return evaluate_on(
            self.rollouts, self.weights, self.share, episodes, temperature, filmed, progress, probe
        )

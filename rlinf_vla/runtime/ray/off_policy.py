"""Run off-policy algorithms on Ray: rollout workers fill the trainer ranks' replay buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rlinf_vla.algorithms.off_policy import OffPolicy, OffPolicyConfig
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.transitions import ACTED, EpisodeRecords
from rlinf_vla.core.types import Episodes, Tensors
from rlinf_vla.data.from_dataset import dataset_transitions, require_same_control_rate
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.evaluation_episodes import EpisodeResult
from rlinf_vla.rollout.transitions import ChunkRewards
from rlinf_vla.runtime import builders, run_directory
from rlinf_vla.runtime.base import Runtime
from rlinf_vla.runtime.off_policy import (
    RANKS,
    SimulatorFlow,
    append_all,
    learn_from_replay,
    open_replays,
)
from rlinf_vla.runtime.ray.flow import Workers
from rlinf_vla.runtime.ray.pool import Pool, parts
from rlinf_vla.runtime.ray.publisher import Publisher
from rlinf_vla.runtime.ray.rollout_workers import evaluate_on
from rlinf_vla.runtime.ray.serialization import Packed
from rlinf_vla.runtime.ray.trainer_workers import Trainers, TrainerWorker
from rlinf_vla.runtime.ray.worker import add_spans
from rlinf_vla.telemetry.timeline import Timeline


class LearnerWorker(TrainerWorker):
    """A trainer rank of an off-policy algorithm, with its part of the replay buffers."""

    def open_replays(
        self, directory: Path, state: dict[str, Any], instructions: tuple[str, ...]
    ) -> list[tuple[int, int]]:
        """Open the buffers; return (records ever added, records to sample from) of each."""
        self.policy.fit_instructions(instructions)
        self.replays = open_replays(directory, self.algorithm.config, state)
        return [(store.total, len(store)) for store in self.replays]

    def append(self, number: int, acted: Packed, episode: Sequence[Any]) -> tuple[int, int]:
        """Add an episode. ``episode``: the reference to its records, which only one rank stores;
        the others need ``acted``."""
        import ray

        store = self.replays[number]
        store.append((ray.get(episode[0]) if store.stores_next else acted).tensors())
        return store.total, len(store)

    def append_dataset(self, config: OffPolicyConfig) -> tuple[tuple[int, int], list[bool]]:
        """Add the episodes of ``config.dataset`` as demonstrations; return also which succeeded.

        Every rank reads the whole dataset.
        """
        store = self.replays[1]
        successes = append_all(store, dataset_transitions(self.policy, config))
        return (store.total, len(store)), successes

    def flush(self, number: int) -> None:
        self.replays[number].flush()

    def forget_records(self, number: int, total: int) -> None:
        self.replays[number].forget(total)

    def learn(self, updates: int, iteration: int, algorithm: dict[str, Any]) -> dict[str, float]:
        """``algorithm``: the state of the driver's, which adapts it."""
        self.algorithm.restore(algorithm)
        with self.builders.update_threads():
            return learn_from_replay(
                self.trainer,
                self.algorithm,
                self.replays,
                updates,
                self.builders.settings.run_seed,
                iteration,
            )

    def acting_weights(self) -> Tensors:
        return self.trainer.acting_weights()


class LearnersReplay:
    """One of the replay buffers of the trainer ranks."""

    def __init__(self, trainers: Trainers, number: int, size: tuple[int, int]) -> None:
        self._trainers = trainers
        self._number = number
        self.total, self._length = size

    def __len__(self) -> int:
        return self._length

    def append(self, episode: Tensors) -> None:
        import ray

        stored = ray.put(Packed.of(episode))
        # a reference within a list is not fetched until it is asked for
        self.set_size(
            self._trainers.call(
                "append", self._number, Packed.of({ACTED: episode[ACTED]}), [stored]
            )[0][0]
        )

    def set_size(self, size: tuple[int, int]) -> None:
        self.total, self._length = size

    def flush(self) -> None:
        self._trainers.call("flush", self._number)

    def forget(self, total: int) -> None:
        self._trainers.call("forget_records", self._number, total)


class RayCollector:
    """A ``TransitionCollector`` that runs episodes on the rollout workers of a cluster."""

    def __init__(self, pool: Pool, trainers: Trainers, share: int) -> None:
        """``share``: episodes per call of a worker."""
        self.pool = pool
        self._publisher = Publisher(pool, trainers)
        introduced = pool.call("worker_info")[0]
        self.env = introduced.env
        self.steps = self.env.steps(introduced.policy.chunk)
        self.share = share
        self._version = 0
        self.publish()

    def publish(self) -> None:
        self._version += 1
        self.weights, self._sent = self._publisher.publish(self._version)

    def collect(
        self,
        episodes: Episodes,
        rewards: ChunkRewards,
        expert: bool,
        timeline: Timeline,
        progress: Callable[[float], None],
    ) -> list[EpisodeRecords]:
        works = [(self.weights, part, rewards, expert) for part in parts(episodes, self.share)]
        found = []
        for played, spans in self.pool.map("collect_transitions", works, progress):
            found += [EpisodeRecords(packed.tensors(), *outcome) for packed, *outcome in played]
            add_spans(timeline, spans)
        return found

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
            self.pool, self.weights, self.share, episodes, temperature, filmed, progress, probe
        )

    def metrics(self) -> dict[str, float]:
        lost, recovery_s = self.pool.news()
        return {"faults/rollout": float(lost), "faults/recovery_s": recovery_s, **self._sent}


class RayOffPolicyFlow(SimulatorFlow):
    """Off-policy flow whose learners are the trainer ranks."""

    shown: LearnersReplay

    def __init__(
        self,
        collector: RayCollector,
        trainers: Trainers,
        settings: Settings,
        config: OffPolicyConfig,
        stores: Any,
    ) -> None:
        super().__init__(settings, config, *stores)
        self.collector = collector
        self._trainers = trainers

    def show(self, episodes: int) -> list[bool]:
        if self.config.dataset is None:
            return super().show(episodes)
        require_same_control_rate(self.config.dataset, [self.collector.env])
        size, successes = self._trainers.call("append_dataset", self.config)[0][0]
        self.shown.set_size(size)
        return list(successes)

    def will_leave(self) -> bool:
        return self._trainers.will_leave()

    def save(self) -> dict[str, Any]:
        ranks = len(self._trainers.actors)
        return super().save() | ({RANKS: ranks} if ranks > 1 else {})

    def learn(self, updates: int, algorithm: OffPolicy) -> dict[str, float]:
        metrics: dict[str, float] = self._trainers.call(
            "learn", updates, self.iteration, algorithm.state()
        )[0][0]
        return metrics


@contextmanager
def open_off_policy(
    recipe: Recipe, workers: Workers, directory: Path, checkpoint: Path | None
) -> Iterator[Runtime]:
    """Restore ``checkpoint`` and yield the runtime. Raises UserError."""
    trainers = workers.trainers
    state = trainers.restore(checkpoint)
    collector = RayCollector(
        workers.rollouts, trainers, recipe.env.num_envs // recipe.cluster.shards
    )
    sizes = trainers.call(
        "open_replays", directory / run_directory.REPLAY, state, collector.env.instructions
    )[0][0]
    stores = [LearnersReplay(trainers, number, size) for number, size in enumerate(sizes)]
    flow = RayOffPolicyFlow(
        collector,
        trainers,
        builders.actor_settings(recipe, recipe.rollout.temperature),
        recipe.algorithm,
        stores,
    )

    def save(state: dict[str, Any]) -> None:
        trainers.save(directory / run_directory.CHECKPOINTS, state, recipe.checkpoints.keep)

    yield Runtime(
        flow,
        collector.env,
        collector.env.control_hz / collector.steps,
        partial(collector.evaluate, recipe.episodes),
        save,
        state,
    )

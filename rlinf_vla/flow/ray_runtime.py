"""The macro flow on a Ray cluster: rollout and reference workers that may be lost at any moment, and the trainer's ranks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlinf_vla.algorithms.on_policy import Batch, OnPolicy
from rlinf_vla.evaluation.sweep import EpisodeResult
from rlinf_vla.flow.base import OnPolicyFlow
from rlinf_vla.flow.pool import HEALTH, Patience, Pool, ShardLost, WorkerLost, wait
from rlinf_vla.flow.ray_cluster import Role, placed
from rlinf_vla.flow.runtime import drawn_episodes
from rlinf_vla.flow.wire import light_trajectory
from rlinf_vla.flow.workers import Builders, Introduction, Played, ReferenceWorker, RolloutWorker, TrainerWorker, clock_offset, shifted
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.collector import rollout_calls
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.types import Rollouts, Trajectory

_LOOK = 0.1
"""Seconds between looks at whether the run is to end."""


class TrainerLost(RuntimeError):
    """What it knew is in the last complete checkpoint only."""


class Trainers:
    """The trainer's ranks, which do everything together."""

    def __init__(self, actors: Sequence[Any], patience: Patience) -> None:
        self.actors, self._patience = actors, replace(patience, heartbeat=patience.start, call=patience.start)
        self.introduction: Introduction = self.call("ready")[0][0]
        self._patience = patience

    def call(self, method: str, *arguments: Any, returns: int = 1) -> list[list[Any]]:
        """Of each rank, references to what ``method`` returned, the first of them read. Raises TrainerLost."""
        refs = [getattr(actor, method).options(num_returns=returns).remote(*arguments) for actor in self.actors]
        refs = refs if returns > 1 else [[ref] for ref in refs]
        try:
            return [
                [*wait(actor, each[:1], self._patience, f"trainer {rank}"), *each[1:]]
                for rank, (actor, each) in enumerate(zip(self.actors, refs, strict=True))
            ]
        except WorkerLost as loss:
            raise TrainerLost(str(loss)) from loss

    def close(self) -> None:
        import ray

        for actor in self.actors:
            ray.kill(actor)


@dataclass(frozen=True)
class Task:
    """A shard to be played: by a method of the rollout workers, for an iteration, by a version of the policy."""

    method: str
    iteration: int
    version: int
    arguments: tuple[Any, ...]


class Shards:
    """Shards on their way, in a fixed order; iterating waits for each."""

    def __init__(self, items: Sequence[tuple[Task, Future[Trajectory]]], streaming: bool, look: Callable[[float], None]) -> None:
        self.items, self._streaming, self._look = items, streaming, look

    def __iter__(self) -> Iterator[Trajectory]:
        if not self._streaming:
            for _, future in self.items:
                self._result(future)
        for _, future in self.items:
            yield self._result(future)

    def _result(self, future: Future[Trajectory]) -> Trajectory:
        while True:
            self._look(sum(each.done() for _, each in self.items) / len(self.items))
            try:
                return future.result(timeout=_LOOK)
            except NotYet:
                if future.done():  # the work's own time-out
                    raise


class RayFlow(OnPolicyFlow):
    def __init__(
        self,
        rollouts: Pool,
        references: Pool | None,
        trainers: Trainers,
        num_envs: int,
        settings: Settings,
        streaming: bool = True,
        **options: Any,
    ) -> None:
        """``num_envs``: of all rollout workers together. ``options``: see ``OnPolicyFlow``."""
        super().__init__(settings, Timeline(), **options)
        self.rollouts, self.references, self.trainers = rollouts, references, trainers
        self.workers, self.num_envs, self.streaming = len(rollouts.actors), num_envs, streaming
        introduced: Introduction = rollouts.call("introduce")[0]
        assert introduced.env is not None
        self.env, self.chunk = introduced.env, introduced.policy.chunk
        self._serial = itertools.count()
        self._serials: dict[int, list[int]] = {}
        self._heavy: dict[int, Any] = {}
        self._weights: dict[int, Any] = {}
        self._shown = False
        self._executor = ThreadPoolExecutor(max_workers=256, thread_name_prefix="shard")

    def begin(self, iteration: int) -> None:
        super().begin(iteration)
        if self.policy_version not in self._weights:
            self.send_weights()
        self._began, self._playing, self._load_s = time.perf_counter(), 0.0, 0.0
        self._ended, self._steps = self._began, 0

    def start_slots(self, iteration: int, version: int, horizon: int) -> Rollouts:
        calls, each = rollout_calls(horizon, self.env.episode_limit, self.chunk), self.num_envs // self.workers
        tasks = [("collect", (iteration, first, calls)) for first in range(0, self.num_envs, each)]
        return self._start([Task(method, iteration, version, arguments) for method, arguments in tasks])

    def start_groups(self, iteration: int, version: int, groups: int, attempts: int, draw: int) -> Rollouts:
        episodes = drawn_episodes(self.settings.run_seed, iteration, groups, draw, len(self.env.tasks)).repeat(attempts)
        each = attempts * max(1, -(-(self.num_envs // self.workers) // attempts))
        parts = [episodes[first : first + each] for first in range(0, len(episodes), each)]
        return self._start([Task("collect_episodes", iteration, version, (part,)) for part in parts])

    def reference(self, rollouts: Rollouts) -> Rollouts:
        assert isinstance(rollouts, Shards)
        return self._shards([(task, self._executor.submit(self._referenced, task, future)) for task, future in rollouts.items])

    def update(self, batch: Batch, algorithm: OnPolicy, value_only: bool = False) -> bool:
        config = algorithm.config
        if config.sft_coef and not value_only and not self._shown:
            ((demonstrations, expert),) = self.rollouts.call("demonstrate", config.demonstrations)
            self.trainers.call("show", demonstrations)
            self._shown = True
            self.log({"sft/expert_success": expert} if expert is not None else {})
        with self.timeline.span("update", "trainer"):
            metrics, parity, seconds = self.trainers.call("update", batch, value_only, self.iteration, self.policy_version)[0][0]
        self.parity = self.parity if self.parity is not None else parity
        self.log_update(metrics)
        self.log({"timing_s/update": self.metrics.get("timing_s/update", 0.0) + seconds})
        return algorithm.enough(metrics)

    def publish(self) -> None:
        super().publish()
        serials = self._serials.pop(self.iteration, [])
        self.trainers.call("forget", serials)
        for serial in serials:
            self._heavy.pop(serial)
        self.send_weights()
        for version in [each for each in self._weights if each < self.policy_version - self.staleness]:
            del self._weights[version]
        if self._steps:
            self.log_rollout(self._ended - self._began, self._steps)
        seconds = time.perf_counter() - self._began
        pools = [self.rollouts, *([self.references] if self.references else [])]
        self.log(
            {
                "weights/load_s": self._load_s,
                "utilisation/rollout": self._playing / (self.workers * seconds),
                "utilisation/trainer": self.metrics.get("timing_s/update", 0.0) / seconds,
                "faults/recovery_s": max(pool.recovery_s for pool in pools),
            }
            | {f"faults/{pool.role}": float(pool.faults) for pool in pools}
        )

    def send_weights(self) -> None:
        """All that trains is put where every worker can read it; who has an older version reads it before it next works."""
        started = time.perf_counter()
        with self.timeline.span("publish", "trainer"):
            ((nbytes, packed), *_) = self.trainers.call("weights", returns=2)
        self._weights[self.policy_version] = packed
        self.log({"weights/bytes": float(nbytes), "weights/publish_s": time.perf_counter() - started})

    def evaluate(
        self, episodes: int, temperature: float, filmed: int, progress: Callable[[float], None] = lambda fraction: None
    ) -> list[EpisodeResult]:
        """The present policy on the first evaluation episodes, shared out among the rollout workers."""
        if self.policy_version not in self._weights:
            self.send_weights()
        weights, size = self._weights[self.policy_version], max(1, self.num_envs // self.workers)
        parts = [range(first, min(first + size, episodes)) for first in range(0, episodes, size)]

        def play(part: range) -> list[EpisodeResult]:
            return self.rollouts.call("sweep", self.policy_version, weights, part, temperature, filmed)[0]

        futures = [self._executor.submit(play, part) for part in parts]
        results = []
        for index, future in enumerate(futures):
            results += future.result()
            progress((index + 1) / len(futures))
        return results

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start(self, tasks: Sequence[Task]) -> Shards:
        return self._shards([(task, self._executor.submit(self._produce, task)) for task in tasks])

    def _shards(self, items: Sequence[tuple[Task, Future[Trajectory]]]) -> Shards:
        return Shards(items, self.streaming, self._rolling)

    def _produce(self, task: Task) -> Trajectory:
        """Played by some worker, and in the trainer's hands."""
        while True:
            version = task.version
            played, heavy = self.rollouts.call(task.method, version, self._weights[version], *task.arguments, returns=2)
            serial = next(self._serial)
            try:
                self.trainers.call("accept", serial, heavy)
            except ShardLost:
                continue
            self._serials.setdefault(task.iteration, []).append(serial)
            self._heavy[serial] = heavy
            light = light_trajectory(played.light, serial)
            self._note(played, int(light.valid.sum()))
            return light

    def _referenced(self, task: Task, future: Future[Trajectory]) -> Trajectory:
        shard = future.result()
        while True:
            serial = int(shard.inputs["row"].flatten()[0]) >> 32
            plain = replace(shard, inputs={})
            try:
                if self.references is not None:
                    (packed,) = self.references.call("reference", plain, self._heavy[serial])
                else:
                    ((packed,), *_) = self.trainers.call("reference", plain, self._heavy[serial])
                return replace(shard, **packed.tensors())
            except ShardLost:
                shard = self._produce(task)

    def _note(self, played: Played, steps: int) -> None:
        spans = shifted(played.spans, -clock_offset())
        for span in spans:
            self.timeline.add(*span)
        self._playing += max(span.end for span in spans) - min(span.start for span in spans)
        self._load_s = max(self._load_s, played.load_s)
        self._ended, self._steps = time.perf_counter(), self._steps + steps


@contextmanager
def launched(
    builders: Callable[[str], Builders],
    roles: Mapping[str, Role],
    patience: Patience,
    num_envs: int,
    say: Callable[[str], None],
    **options: Any,
) -> Iterator[RayFlow]:
    """The flow and its workers, in the cluster that this process is connected to. ``builders(role)``; ``options``: see :class:`RayFlow`."""
    import ray

    remote: Any = ray.remote
    with ExitStack() as stack:
        places = stack.enter_context(placed(roles, patience.start))

        def spawn(kind: type, role: str, place: int) -> Any:
            actor = remote(max_restarts=0, concurrency_groups={HEALTH: 1}, **places[role][place])(kind)
            return actor.remote(builders(role), place)

        def pool(kind: type, role: str) -> Pool:
            found = Pool(role, partial(spawn, kind, role), roles[role].count, patience, say)
            stack.callback(found.close)
            return found

        rollouts = pool(RolloutWorker, "rollout")
        references = pool(ReferenceWorker, "reference") if roles["reference"].count else None
        trainers = Trainers([spawn(TrainerWorker, "trainer", rank) for rank in range(roles["trainer"].count)], patience)
        stack.callback(trainers.close)
        flow = RayFlow(rollouts, references, trainers, num_envs, builders("trainer").settings, **options)
        stack.callback(flow.close)
        yield flow

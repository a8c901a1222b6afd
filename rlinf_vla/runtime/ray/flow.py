"""Macro flow on a Ray cluster, with workers that may be lost at any moment and a trainer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rlinf_vla.algorithms.on_policy import Batch, OnPolicy
from rlinf_vla.config.cluster import streams
from rlinf_vla.core.types import Rollouts, Tensors, Trajectory
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.collector import rollout_calls
from rlinf_vla.rollout.episodes import drawn_episodes
from rlinf_vla.rollout.evaluation_episodes import EpisodeResult
from rlinf_vla.runtime.base import OnPolicyFlow
from rlinf_vla.runtime.ray.growth import Growth
from rlinf_vla.runtime.ray.pool import Pool, ShardLost, parts
from rlinf_vla.runtime.ray.publisher import Publisher
from rlinf_vla.runtime.ray.rollout_workers import ShardDone, Weights, evaluate_on
from rlinf_vla.runtime.ray.serialization import Packed, light_trajectory, serial_of
from rlinf_vla.runtime.ray.shards import Shards, Task
from rlinf_vla.runtime.ray.trainer_workers import Trainers
from rlinf_vla.runtime.ray.worker import HEALTH, WorkerInfo, add_spans, followed
from rlinf_vla.telemetry.timeline import trainer_track


class Workers(NamedTuple):
    """The workers of a run, by role; None: the run has none of the role."""

    rollouts: Pool
    rewards: Pool | None
    references: Pool | None
    features: list[Any]
    """Actors with the backbone of a split policy; rollout workers then have only its head."""
    trainers: Trainers
    growth: Growth | None = None
    """Adds rollout workers."""

    def actors(self) -> dict[str, list[Any]]:
        """Return the actors of each role."""
        pools = {
            pool.role: pool.actors
            for pool in (self.rollouts, self.rewards, self.references)
            if pool is not None
        }
        return {"trainer": list(self.trainers.actors), **pools, "feature": self.features}


class RayFlow(OnPolicyFlow):
    """Flow of on-policy algorithms on a Ray cluster."""

    def __init__(self, workers: Workers, num_envs: int, settings: Settings, **options: Any) -> None:
        """``num_envs``: of all rollout workers. ``options``: see ``OnPolicyFlow``."""
        super().__init__(settings, **options)
        self.rollouts, self.rewards, self.references, self.features, trainers, self._growth = (
            workers
        )
        cluster = self.rollouts.cluster
        self.workers = len(self.rollouts.actors)
        self.num_envs = num_envs
        self.offload = cluster.offload
        self.share = max(1, num_envs // (self.workers * cluster.shards_per_worker))
        """Environments per shard."""
        self.streaming = streams(cluster.streaming, cluster.offload)
        introduced: WorkerInfo = self.rollouts.call("worker_info")[0]
        assert introduced.env is not None and introduced.policy is not None
        self.trainers = trainers
        self.env = introduced.env
        self.steps = self.env.steps(introduced.policy.chunk)
        """Control steps of a policy call."""
        self._feature_pids: dict[int, int] = {}
        self._serial = itertools.count()
        self._serials: dict[int, list[int]] = {}
        self._heavy: dict[int, tuple[Any, Any]] = {}
        """Serial number of a shard -> (what only the policy reads, what only a reward reads)."""
        self._publisher = Publisher(self.rollouts, trainers, bool(self.features), self.staleness)
        self._weights: dict[int, Weights] = {}
        self._shown = False
        self._executor = ThreadPoolExecutor(max_workers=256, thread_name_prefix="shard")

    def begin(self, iteration: int) -> None:
        super().begin(iteration)
        if self.policy_version not in self._weights:
            self.send_weights()
        if self._growth is not None:
            self._growth.look()
        self._began = self._ended = time.perf_counter()
        self._done: list[ShardDone] = []
        """Shards that were finished in this iteration, until ``self._ended``."""

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.env.tasks

    def start_slots(self, iteration: int, version: int, horizon: int) -> Rollouts:
        calls = rollout_calls(horizon, self.env.episode_limit, self.steps)
        firsts = range(0, self.num_envs, self.share)
        return self._start(
            [Task("collect", iteration, version, (iteration, first, calls)) for first in firsts]
        )

    def start_groups(
        self, iteration: int, version: int, groups: int, attempts: int, draw: int
    ) -> Rollouts:
        episodes = drawn_episodes(
            self.settings.run_seed, iteration, groups, draw, len(self.env.tasks)
        ).repeat(attempts)
        each = attempts * max(1, -(-self.share // attempts))
        return self._start(
            [
                Task("collect_episodes", iteration, version, (part,))
                for part in parts(episodes, each)
            ]
        )

    def score(self, rollouts: Rollouts) -> Rollouts:
        return super().score(
            rollouts if self.rewards is None else self._each(rollouts, self._rewarded)
        )

    def reference(self, rollouts: Rollouts) -> Rollouts:
        if self.offload:
            list(rollouts)  # until they are complete, the rollout workers have the GPUs
            self._rest()
            if self.references is None:
                self.trainers.call("wake")
        return self._each(rollouts, self._referenced)

    def update(self, batch: Batch, algorithm: OnPolicy, value_only: bool = False) -> bool:
        import ray

        config = algorithm.config
        if config.sft_coef and not value_only and not self._shown:
            ((demonstrations, expert),) = self.rollouts.call("demonstrate", config.demonstrations)
            self.trainers.call("show", demonstrations)
            self._shown = True
            self.log({"sft/expert_success": expert} if expert is not None else {})
        if self.offload:  # the workers share the trainer's GPUs
            self._rest()
            self.trainers.call("wake")
        self.changed = True
        results = self.trainers.call(
            "update",
            ray.put(batch),
            value_only,
            self.iteration,
            self.policy_version,
            algorithm.state(),
        )
        add_spans(self.timeline, [span for ((*_, span),) in results])
        metrics, parity, span = results[0][0]
        self.parity = self.parity if self.parity is not None else parity
        self.log_update(metrics)
        self.log(
            {"timing_s/update": self.metrics.get("timing_s/update", 0.0) + span.end - span.start}
        )
        return algorithm.enough(metrics)

    def _rest(self) -> None:
        """Move idle workers off the GPU; the replacement of a lost one starts independently."""
        import ray

        actors = [
            *self.rollouts.actors,
            *self.features,
            *(self.references.actors if self.references else []),
        ]
        ray.wait(
            [actor.rest.remote() for actor in actors],
            num_returns=len(actors),
            timeout=self.rollouts.cluster.heartbeat_s,
        )

    def publish(self) -> None:
        super().publish()
        serials = self._serials.pop(self.iteration, [])
        self.trainers.call("forget", serials)
        for serial in serials:
            self._heavy.pop(serial)
        self.send_weights()
        present = self.policy_version
        self._weights = {
            version: weights
            for version, weights in self._weights.items()
            if version == present or self.is_pending_version(version)
        }
        if self._done:
            self.log_rollout(self._ended - self._began, sum(each.steps for each in self._done))
        if self.features:
            up, down = (
                sum(getattr(each, way) for each in self._done) for way in ("sent", "received")
            )
            self.log({"split/bytes_up": float(up), "split/bytes_down": float(down)})
        seconds = time.perf_counter() - self._began
        pools = [
            pool for pool in (self.rollouts, self.rewards, self.references) if pool is not None
        ]
        self.log(
            {
                "rollout/bytes": float(sum(each.nbytes for each in self._done)),
                "weights/load_s": max((each.load_s for each in self._done), default=0.0),
                "utilisation/rollout": sum(each.seconds for each in self._done)
                / (max(1, self.rollouts.size) * seconds),
                "utilisation/trainer": self.metrics.get("timing_s/update", 0.0) / seconds,
            }
        )
        for pool in pools:
            lost, recovery_s = pool.news()
            longest = max(recovery_s, self.metrics.get("faults/recovery_s", 0.0))
            self.log({f"faults/{pool.role}": float(lost), "faults/recovery_s": longest})
        if self.features:
            self.log({"faults/feature": float(self._restarted())})

    def _restarted(self) -> int:
        """Count feature workers restarted since the last call; starting ones count later."""
        import ray
        from ray import exceptions

        lost = 0
        for place, actor in enumerate(self.features):
            try:
                pid = ray.get(
                    actor.pid.options(concurrency_group=HEALTH).remote(),
                    timeout=self.rollouts.cluster.heartbeat_s,
                )
            except (exceptions.RayActorError, exceptions.GetTimeoutError):
                continue
            lost += self._feature_pids.setdefault(place, pid) != pid
            self._feature_pids[place] = pid
        return lost

    def earlier_weights(self) -> dict[int, Tensors]:
        return {version: packed.tensors() for version, packed in self._packed_earlier().items()}

    def restore_earlier_weights(self, earlier_weights: dict[int, Tensors]) -> None:
        for version, tensors in earlier_weights.items():
            self.send_weights(version, Packed.of(tensors))

    def write_checkpoint(self, directory: Path, state: dict[str, Any], keep: int) -> None:
        """Write a checkpoint in the trainer's process, on its machine."""
        self.trainers.save(directory, state, keep, self._packed_earlier())

    def _packed_earlier(self) -> dict[int, Packed]:
        return {
            version: followed(weights.everything)
            for version, weights in self._weights.items()
            if self.is_pending_version(version)
        }

    def send_weights(
        self, version: int | None = None, earlier_weights: Packed | None = None
    ) -> None:
        """Publish the trained weights, or ``earlier_weights``, for the workers' next work."""
        version = self.policy_version if version is None else version
        with self.timeline.span("publish", trainer_track(0, len(self.trainers.actors))):
            self._weights[version], metrics = self._publisher.publish(version, earlier_weights)
        self.log(metrics)
        if self.offload:
            self.trainers.call("rest")

    def evaluate(
        self,
        episodes: int,
        temperature: float,
        filmed: int,
        progress: Callable[[float], None] = lambda fraction: None,
        probe: str | None = None,
    ) -> list[EpisodeResult]:
        """Evaluate the current policy on the first ``episodes``, split over the rollout workers."""
        if self.policy_version not in self._weights:
            self.send_weights()
        weights = self._weights[self.policy_version]
        return evaluate_on(
            self.rollouts, weights, self.share, episodes, temperature, filmed, progress, probe
        )

    def will_leave(self) -> bool:
        return self.trainers.will_leave()

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start(self, tasks: Sequence[Task]) -> Shards:
        return self._shards([(task, self._executor.submit(self._produce, task)) for task in tasks])

    def _shards(self, items: Sequence[tuple[Task, Future[Trajectory]]]) -> Shards:
        return Shards(items, self.streaming, self._rolling)

    def _produce(self, task: Task) -> Trajectory:
        """Roll out a shard on any worker and give its heavy part to the trainer."""
        while True:
            played, heavy, scene = self.rollouts.call(
                task.method, self._weights[task.version], *task.arguments, returns=3
            )
            serial = next(self._serial)
            try:
                self.trainers.call("accept", serial, heavy)
            except ShardLost:
                continue
            self._serials.setdefault(task.iteration, []).append(serial)
            self._heavy[serial] = (heavy, scene)
            add_spans(self.timeline, played.spans)
            self._ended = time.perf_counter()
            self._done.append(played)
            return light_trajectory(played.light, serial)

    def _each(self, rollouts: Rollouts, work: Callable[[Trajectory, Any, Any], Packed]) -> Shards:
        """Add the result of ``work`` to each shard as soon as the shard is available."""
        assert isinstance(rollouts, Shards)

        def chained(task: Task, future: Future[Trajectory]) -> Trajectory:
            shard = future.result()
            while True:
                heavy, scene = self._heavy[serial_of(shard)]
                try:
                    found: dict[str, Any] = dict(
                        work(replace(shard, inputs={}), heavy, scene).tensors()
                    )
                    return replace(shard, **found)
                except ShardLost:
                    shard = replace(self._produce(task), reward=shard.reward)

        return self._shards(
            [
                (task, self._executor.submit(chained, task, future))
                for task, future in rollouts.items
            ]
        )

    def _rewarded(self, shard: Trajectory, heavy: Any, scene: Any) -> Packed:
        assert self.rewards is not None
        return self.rewards.call("score", shard, scene, self.env)[0]

    def _referenced(self, shard: Trajectory, heavy: Any, scene: Any) -> Packed:
        if self.references is not None:
            return self.references.call("reference", shard, heavy)[0]
        return self.trainers.call("reference", shard, heavy)[0][0]

"""The flow of PPO and GRPO: rollouts in shards, from workers of this process or of a cluster.

A shard has a light part, which the algorithm reads, and a heavy one (inputs and latents), which
goes from the rollout worker to the trainer directly. In one process, a rollout is one shard, and is
finished when it was started.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from rlinf_vla.algorithms.on_policy import Batch, OnPolicy
from rlinf_vla.config.cluster import MEASURED, streams
from rlinf_vla.core.devices import MEMORY
from rlinf_vla.core.types import Rollouts, Tensors, Trajectory, gather
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.collector import (
    call_metrics,
    episode_metrics,
    rollout_calls,
    rollout_metrics,
)
from rlinf_vla.rollout.episodes import drawn_episodes
from rlinf_vla.rollout.evaluation_episodes import EpisodeResult
from rlinf_vla.rollout.faults import faults_of
from rlinf_vla.runtime.base import BaseFlow
from rlinf_vla.runtime.workers.base import ShardLost, WorkerInfo, Workers, add_spans, fetched
from rlinf_vla.runtime.workers.rollout import ShardDone, Weights, evaluate_on
from rlinf_vla.runtime.workers.shards import (
    Packed,
    Shards,
    Task,
    light_trajectory,
    parts,
    serial_of,
)
from rlinf_vla.telemetry.timeline import trainer_track
from rlinf_vla.training.ranks import TrainerSplit


class Inline(Executor):
    """Does at once what is submitted; what it raises, ``submit`` raises."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments, **named))
        return future


class OnPolicyFlow(BaseFlow):
    """Flow of on-policy algorithms.

    It starts rollouts ahead of their iteration and merges the metrics of several updates in one.
    """

    def __init__(
        self,
        workers: Workers,
        num_envs: int,
        settings: Settings,
        staleness: int = 0,
        iterations: int | None = None,
    ) -> None:
        """``num_envs``: of all rollout workers. ``iterations``: in the run; None: unknown."""
        super().__init__(settings)
        self.rollouts, self.rewards, self.references, self.features, trainers, self._growth = (
            workers
        )
        self._pools = workers.pools()
        self.staleness = staleness
        self.iterations = iterations
        self.inline: bool = self.rollouts.inline
        cluster = self.rollouts.cluster
        self.num_envs = num_envs
        self.offload = cluster.offload and not self.inline
        shards = 1 if self.inline else len(self.rollouts.actors) * cluster.shards_per_worker
        self.share = max(1, num_envs // shards)
        """Environments per shard."""
        self.streaming = streams(cluster.streaming, cluster.offload)
        worker: WorkerInfo = self.rollouts.call("worker_info")[0]
        assert worker.env is not None and worker.policy is not None
        self.trainers = trainers
        self.split = TrainerSplit(len(trainers.actors), cluster.trainer_split == MEASURED)
        self.env = worker.env
        self.steps = self.env.steps(worker.policy.chunk)
        """Control steps of a policy call."""
        self._ahead: dict[int, Rollouts] = {}
        self._updates = 0.0
        self._scored: list[Rollouts] = []
        self._serial = itertools.count()
        self._serials: dict[int, list[int]] = {}
        self._heavy: dict[int, tuple[Any, Any]] = {}
        """Serial number of a shard -> (what only the policy reads, what only a reward reads)."""
        self._publisher = trainers.publisher(self.rollouts, self.features is not None, staleness)
        self._weights: dict[int, Weights] = {}
        self._sent_demonstrations = False
        self._executor: Executor = (
            Inline()
            if self.inline
            else ThreadPoolExecutor(max_workers=256, thread_name_prefix="shard")
        )

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks that rollouts play."""
        return self.env.tasks

    def begin(self, iteration: int) -> None:
        super().begin(iteration)
        self._updates = 0.0
        self._scored = []
        if self.policy_version not in self._weights:
            self.send_weights()
        if self._growth is not None:
            self._growth.look()
        self._began = self._ended = time.perf_counter()
        self._done: list[ShardDone] = []
        """Shards that were finished in this iteration, until ``self._ended``."""

    # --- the operations of an iteration

    def collect(self, horizon: int) -> Rollouts:
        return self._started(
            lambda iteration, version: self.start_slots(iteration, version, horizon)
        )

    def collect_groups(self, groups: int, attempts: int, draw: int) -> Rollouts:
        return self._started(
            lambda iteration, version: self.start_groups(iteration, version, groups, attempts, draw)
        )

    def start_slots(self, iteration: int, version: int, horizon: int) -> Rollouts:
        """Start the rollout of an iteration with the policy's ``version``."""
        calls = rollout_calls(horizon, self.env.episode_limit, self.steps)
        firsts = range(0, self.num_envs, self.share)
        return self._start(
            [Task("collect", iteration, version, (iteration, first, calls)) for first in firsts]
        )

    def start_groups(
        self, iteration: int, version: int, groups: int, attempts: int, draw: int
    ) -> Rollouts:
        """As ``start_slots``, for whole episodes: see ``Flow.collect_groups``."""
        episodes = drawn_episodes(
            self.settings.run_seed, iteration, groups, draw, len(self.env.tasks)
        ).repeat(attempts)
        size = attempts * max(1, -(-self.share // attempts))
        shards = [episodes] if self.inline else parts(episodes, size)
        return self._start(
            [Task("collect_episodes", iteration, version, (shard,)) for shard in shards]
        )

    def score(self, rollouts: Rollouts) -> Rollouts:
        """Without reward workers, the environments already give the recipe's reward: see
        ``reward_shaping.RewardedEnv``."""
        if self.rewards is not None:
            rollouts = self._each(rollouts, self._rewarded)
        self._scored.append(rollouts)
        return rollouts

    def reference(self, rollouts: Rollouts) -> Rollouts:
        if self.offload:
            list(rollouts)  # until they are complete, the rollout workers have the GPUs
            self._rest()
            if self.references is None:
                self.trainers.call("wake")
        return self._each(rollouts, self._referenced)

    def update(self, batch: Batch, algorithm: OnPolicy, value_only: bool = False) -> bool:
        config = algorithm.config
        if config.sft_coef and not value_only and not self._sent_demonstrations:
            ((demonstrations, expert),) = self.rollouts.call("demonstrate", config.demonstrations)
            self.trainers.call("show", demonstrations)
            self._sent_demonstrations = True
            self.log({"sft/expert_success": expert} if expert is not None else {})
        if self.offload:  # the workers share the trainer's GPUs
            self._rest()
            self.trainers.call("wake")
        self.changed = True
        with self.trainers.heard(lambda fraction: self.progress("update", fraction)):
            results = self.trainers.call(
                "update",
                self.trainers.put(batch),
                value_only,
                self.iteration,
                self.policy_version,
                algorithm.state(),
                self.split.shares,
            )
        add_spans(self.timeline, [span for ((*_, span),) in results])
        metrics, parity, _, span = results[0][0]
        self.split.observe([speed for ((*_, speed, _),) in results])
        self.parity = self.parity if self.parity is not None else parity
        self.log_update(metrics)
        self.log(
            {"timing_s/update": self.metrics.get("timing_s/update", 0.0) + span.end - span.start}
        )
        return algorithm.enough(metrics)

    def publish(self) -> None:
        self._log_scored()
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
            seconds = sum(shard.seconds for shard in self._done)
            self.log_rollout(
                seconds if self.inline else self._ended - self._began,
                sum(shard.steps for shard in self._done),
            )
            self.log(call_metrics(shard.counts for shard in self._done))
        if not self.inline:
            self._log_cluster()

    # --- metrics

    def _log_scored(self) -> None:
        shards = [
            replace(shard, inputs={}, latent={}, reference=None)
            for rollouts in self._scored
            for shard in rollouts
        ]
        if not shards:
            return
        everything = gather(shards)
        by_slot = everything.value.ndim == 2
        self.log(rollout_metrics(everything) if by_slot else episode_metrics(everything))
        self.log_faults(faults_of(everything, self.tasks))
        if self.staleness:
            ages = (self.policy_version - everything.policy_version).float()
            self.log({"rollout/staleness": ages.mean().item()})

    def log_update(self, metrics: dict[str, float]) -> None:
        """Log the means over all optimiser steps of the iteration, and the peaks of memory."""
        steps = metrics["actor/updates"]
        before = self._updates
        self._updates = self._updates + steps
        if before:
            share = steps / max(self._updates, 1)
            earlier = {name: self.metrics.get(name, value) for name, value in metrics.items()}
            metrics = {
                name: max(value, earlier[name])
                if name.startswith(MEMORY)
                else share * value + (1 - share) * earlier[name]
                for name, value in metrics.items()
            }
        self.log(metrics | {"actor/updates": self._updates})

    def _log_cluster(self) -> None:
        """Log what crossed between processes, how busy they were, and which were lost."""
        if self.features is not None:
            sent = sum(shard.sent for shard in self._done)
            received = sum(shard.received for shard in self._done)
            self.log({"split/bytes_up": float(sent), "split/bytes_down": float(received)})
        seconds = time.perf_counter() - self._began
        busy = sum(shard.seconds for shard in self._done)
        self.log(
            {
                "rollout/bytes": float(sum(shard.nbytes for shard in self._done)),
                "weights/load_s": max((shard.load_s for shard in self._done), default=0.0),
                "utilisation/rollout": busy / (max(1, self.rollouts.size) * seconds),
                "utilisation/trainer": self.metrics.get("timing_s/update", 0.0) / seconds,
            }
        )
        for pool in self._pools:
            lost, recovery_s = pool.news()
            longest = max(recovery_s, self.metrics.get("faults/recovery_s", 0.0))
            self.log({f"faults/{pool.role}": float(lost), "faults/recovery_s": longest})

    # --- versions of the weights, and the state of a checkpoint

    def save(self) -> dict[str, Any]:
        return super().save() | self.split.save()

    def is_pending_version(self, version: int) -> bool:
        """Whether ``version`` is an earlier one with rollouts that are yet to be trained on."""
        return self.policy_version - self.staleness <= version < self.policy_version

    def restore_earlier_weights(self, earlier_weights: dict[int, Tensors]) -> None:
        """Restore those of ``packed_earlier`` when the checkpoint to resume was written."""
        for version, tensors in earlier_weights.items():
            self.send_weights(version, Packed.of(tensors))

    def packed_earlier(self) -> dict[int, Packed]:
        return {
            version: fetched(weights.everything)
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

    # --- evaluation

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
        return bool(self.trainers.will_leave())

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    # --- shards

    def _started(self, start: Callable[[int, int], Rollouts]) -> Rollouts:
        """Return this iteration's rollouts and start those of the next ``staleness`` iterations."""
        if not self.staleness:
            return start(self.iteration, self.policy_version)
        end = self.iteration + self.staleness + 1
        for iteration in range(
            self.iteration, end if self.iterations is None else min(end, self.iterations)
        ):
            if iteration not in self._ahead:
                self._ahead[iteration] = start(iteration, max(0, iteration - self.staleness))
        return self._ahead.pop(self.iteration)

    def _start(self, tasks: Sequence[Task]) -> Shards:
        with self.rollouts.heard(self._rolling):
            items = [(task, self._executor.submit(self._produce, task)) for task in tasks]
        return self._shards(items)

    def _shards(self, items: Sequence[tuple[Task, Future[Trajectory]]]) -> Shards:
        return Shards(items, self.streaming, self._rolling)

    def _produce(self, task: Task) -> Trajectory:
        """Roll out a shard on any worker and give its heavy part to the trainer."""
        while True:
            shard, heavy, scene = self.rollouts.call(
                task.method, self._weights[task.version], *task.arguments, returns=3
            )
            serial = next(self._serial)
            try:
                self.trainers.call("accept", serial, heavy)
            except ShardLost:
                continue
            self._serials.setdefault(task.iteration, []).append(serial)
            self._heavy[serial] = (heavy, scene)
            add_spans(self.timeline, shard.spans)
            self._ended = time.perf_counter()
            self._done.append(shard)
            return light_trajectory(shard.light, serial)

    def _each(self, rollouts: Rollouts, work: Callable[[Trajectory, Any, Any], Packed]) -> Shards:
        """Add the result of ``work`` to each shard as soon as the shard is available."""
        assert isinstance(rollouts, Shards)

        def chained(task: Task, future: Future[Trajectory]) -> Trajectory:
            shard = future.result()
            while True:
                heavy, scene = self._heavy[serial_of(shard)]
                try:
                    fields: dict[str, Any] = dict(
                        work(replace(shard, inputs={}), heavy, scene).tensors()
                    )
                    return replace(shard, **fields)
                except ShardLost:
                    shard = replace(self._produce(task), reward=shard.reward)

        return self._shards(
            [
                (task, self._executor.submit(chained, task, future))
                for task, future in rollouts.items
            ]
        )

    def _rewarded(self, shard: Trajectory, heavy: Any, scene: Any) -> Packed:
        rewards: Packed = self.rewards.call("score", shard, scene, self.env)[0]
        return rewards

    def _referenced(self, shard: Trajectory, heavy: Any, scene: Any) -> Packed:
        if self.references is not None:
            reference: Packed = self.references.call("reference", shard, heavy)[0]
        else:
            reference = self.trainers.call("reference", shard, heavy)[0][0]
        return reference

    def _rest(self) -> None:
        """Move idle workers off the GPU."""
        for pool in (self.rollouts, self.features, self.references):
            if pool is not None:
                pool.rest()

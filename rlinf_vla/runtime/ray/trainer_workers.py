"""The trainer on a Ray cluster: one worker per rank, and a handle to all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from rlinf_vla.algorithms.classifier import Frames
from rlinf_vla.algorithms.on_policy import Batch
from rlinf_vla.algorithms.parity import Parity
from rlinf_vla.algorithms.sft import Demonstrations
from rlinf_vla.config.cluster import CUDA, ClusterConfig
from rlinf_vla.core.types import Tensors, Trajectory
from rlinf_vla.rollout.split import head_weights
from rlinf_vla.runtime.base import Restart
from rlinf_vla.runtime.on_policy_updater import OnPolicyUpdater
from rlinf_vla.runtime.ray.broadcast import Held, Order, Outbox, dist
from rlinf_vla.runtime.ray.notices import leaving_nodes
from rlinf_vla.runtime.ray.pool import WorkerLost, wait
from rlinf_vla.runtime.ray.scoring_workers import learning, whole
from rlinf_vla.runtime.ray.serialization import HeavyParts, Packed
from rlinf_vla.runtime.ray.worker import HEALTH, Worker, WorkerInfo, free_gpu, node_address
from rlinf_vla.runtime.supervised import success_logits, supervised_step
from rlinf_vla.telemetry.timeline import Span, trainer_track
from rlinf_vla.training.checkpoint import begin_digests, load_checkpoint, save_checkpoint
from rlinf_vla.training.lora import rounded_weights
from rlinf_vla.training.sharding import shard


class TrainerWorker(Worker):
    """Trainer rank. Only a checkpoint can restore its trained weights and optimiser state."""

    def meeting_point(self) -> tuple[str, int]:
        """Open a store on this rank's machine, where the ranks form a process group."""
        host = node_address()
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def ready(self, meeting_point: tuple[str, int] | None = None, ranks: int = 1) -> WorkerInfo:
        builders = self.builders
        cluster = self.builders.cluster
        self.ranks = ranks
        if meeting_point is not None:
            backend = "nccl" if cluster.device == CUDA else "gloo"
            timeout = timedelta(seconds=cluster.call_timeout_s)
            if self.place:
                self.store = dist.TCPStore(*meeting_point, is_master=False, wait_for_workers=False)
            self.store.set_timeout(timeout)  # of each wait for another rank
            dist.init_process_group(
                backend, store=self.store, rank=self.place, world_size=ranks, timeout=timeout
            )
        with builders.update_threads():
            self.policy = builders.learner()
            if cluster.trainer_sharding == "full":
                shard(self.policy)
            self.trainer = builders.trainer(self.policy)
        begin_digests(self.policy)
        self.algorithm = builders.algorithm()
        self.heavy = HeavyParts()
        self.outbox = Outbox(cluster.torch_device, node_address())  # after the groups of the ranks
        weights, trained = (
            sum(each.numel() for each in group)
            for group in (self.policy.parameters(), self.trainer.parameters.values())
        )
        return self.info(self.policy.spec, weights=weights, trained=trained)

    @cached_property
    def learning(self) -> OnPolicyUpdater:
        return learning(self.builders, self.trainer)

    def rest(self) -> None:
        """Move the policy and the optimiser state off the GPU until there is work again."""
        self.trainer.move("cpu")
        free_gpu()

    def wake(self) -> None:
        self.trainer.move(self.builders.cluster.torch_device)

    def restore(self, checkpoint: Path) -> dict[str, Any]:
        """Load a checkpoint; return its state. Raises UserError if damaged or of another model."""
        return load_checkpoint(checkpoint, self.policy, self.trainer)

    def save(
        self, directory: Path, state: dict[str, Any], keep: int, earlier_weights: dict[int, Packed]
    ) -> None:
        versions = {version: packed.tensors() for version, packed in earlier_weights.items()}
        save_checkpoint(directory, self.policy, self.trainer, state, keep, versions)

    def weights(
        self, earlier: Packed | None = None, broadcast: int | None = None, split: bool = False
    ) -> tuple[Held, Packed, Packed]:
        """Return the weights that act, and with ``split`` those of the action head.

        On all ranks but the first everything is empty. ``earlier`` replaces the current weights.
        ``broadcast``: version as which a copy of what rollout workers load is kept for ``send``.
        """
        everything = self.acting_weights() if earlier is None else earlier.tensors()
        if self.place:
            return Held(), Packed({}), Packed({})
        if self.builders.settings.rounded:
            everything = rounded_weights(self.policy, everything)
        packed = Packed.of(everything)
        head = Packed.of(head_weights(self.policy, everything) if split else {})
        held = Held(packed.nbytes)
        if broadcast is not None:
            own = head if split else packed
            held = Held(
                packed.nbytes, self.outbox.hold(broadcast, own.tensors()), self.outbox.address()
            )
        return held, packed, head

    def acting_weights(self) -> Tensors:
        """Return the trained weights that rollout workers load; all ranks must call it."""
        return self.trainer.weights()

    def send(self, order: Order) -> bool:
        """Broadcast the version kept by ``weights``; return whether it worked."""
        return self.outbox.send(order)

    def accept(self, serial: int, heavy: Packed) -> None:
        """Keep a shard's heavy part on this machine, which then survives its rollout worker."""
        self.heavy.add(serial, heavy)

    def forget(self, serials: Sequence[int]) -> None:
        self.heavy.forget(serials)

    def reference(self, calls: Trajectory, heavy: Packed) -> Packed:
        """Return reference log-probabilities if there is no reference worker."""
        with self.builders.update_threads():
            return Packed.of(
                {
                    "reference": self.learning.reference(whole(calls, heavy)).reshape(
                        calls.log_prob.shape
                    )
                }
            )

    def show(self, demonstrations: Demonstrations) -> None:
        """Set the demonstrations for the imitation loss of updates."""
        self.learning.shown = demonstrations

    def step(self, batch: Demonstrations | Frames, rate: float) -> dict[str, float]:
        """Take one optimiser step on ``batch``; return its metrics."""
        with self.builders.update_threads():
            return supervised_step(self.trainer, self.builders.settings.run_seed, batch, rate)

    def success_logits(self, frames: Frames) -> Tensor:
        with self.builders.update_threads():
            return success_logits(self.trainer, frames)

    def update(
        self,
        batch: Batch,
        value_only: bool,
        iteration: int,
        version: int,
        algorithm: dict[str, Any],
    ) -> tuple[dict[str, float], Parity | None, Span]:
        """Return metrics, ``Learning.parity``, and the span of the work, in ``time.time``.

        ``algorithm``: the state of the driver's, which adapts it.
        """
        started = time.time()
        self.algorithm.restore(algorithm)
        with self.builders.update_threads():
            batch = replace(batch, calls=self.heavy.complete(batch.calls))
            metrics = self.learning.update(batch, self.algorithm, value_only, iteration, version)
        return (
            metrics,
            self.learning.parity,
            Span("update", trainer_track(self.place, self.ranks), started, time.time()),
        )


class TrainerLost(Restart, RuntimeError):
    """A trainer rank was lost; its state exists only in the last complete checkpoint."""


class Trainers:
    """All trainer ranks; each call goes to all of them."""

    def __init__(self, actors: Sequence[Any], cluster: ClusterConfig) -> None:
        self._order = threading.Lock()
        patience = cluster.start_timeout_s
        self.actors = actors
        self._patience = replace(cluster, heartbeat_s=patience, call_timeout_s=patience)
        meeting_point = (
            wait(actors[0], [actors[0].meeting_point.remote()], self._patience, "trainer 0")
            if len(actors) > 1
            else []
        )
        introduced = self.call("ready", *meeting_point, *([len(actors)] if meeting_point else []))
        self.worker_info: WorkerInfo = introduced[0][0]
        self._nodes = {each.node_id for (each,) in introduced}
        self._patience = cluster

    def will_leave(self) -> bool:
        """Return whether the machine of a rank was told to leave the cluster."""
        return not self._nodes.isdisjoint(leaving_nodes())

    def call(self, method: str, *arguments: Any, returns: int = 1) -> list[list[Any]]:
        """Call ``method`` on all ranks; return each rank's references, the first as a value.

        Raises TrainerLost.
        """
        import ray

        with (
            self._order
        ):  # several threads call, and collectives need the same order of calls on all ranks
            refs = [
                getattr(actor, method).options(num_returns=returns).remote(*arguments)
                for actor in self.actors
            ]
        refs = refs if returns > 1 else [[ref] for ref in refs]
        waiting = {rank: each[0] for rank, each in enumerate(refs)}
        found = dict[int, list[Any]]()
        try:
            while (
                waiting
            ):  # for the rank that is ready first, because the others wait for one that was lost
                ready = ray.wait(list(waiting.values()), timeout=0)[0]
                rank = next((rank for rank, ref in waiting.items() if ref in ready), min(waiting))
                ref = waiting.pop(rank)
                values = wait(
                    self.actors[rank],
                    [ref],
                    self._patience,
                    f"trainer {rank}",
                    list(waiting.values()),
                )
                if values:
                    found[rank] = [*values, *refs[rank][1:]]
                else:
                    waiting[rank] = ref
            return [found[rank] for rank in range(len(refs))]
        except WorkerLost as loss:
            raise TrainerLost(str(loss)) from loss
        except Exception as error:
            lost = self._lost()
            if lost is None:
                raise
            raise TrainerLost(lost) from error  # the other ranks only failed to reach it

    def restore(self, checkpoint: Path | None) -> dict[str, Any]:
        """Load a checkpoint, if there is one; return its state. Raises UserError, TrainerLost."""
        state: dict[str, Any] = (
            self.call("restore", checkpoint)[0][0] if checkpoint is not None else {}
        )
        return state

    def save(
        self,
        directory: Path,
        state: dict[str, Any],
        keep: int,
        earlier_weights: Mapping[int, Packed] = MappingProxyType({}),
    ) -> None:
        """Write a checkpoint on the first rank's machine. Raises TrainerLost."""
        self.call("save", directory, state, keep, dict(earlier_weights))

    def _lost(self) -> str | None:
        if len(self.actors) == 1:
            return None
        for rank, actor in enumerate(self.actors):
            try:
                wait(
                    actor,
                    [actor.ping.options(concurrency_group=HEALTH).remote()],
                    self._patience,
                    f"trainer {rank}",
                )
            except WorkerLost as loss:
                return str(loss)
        return None

    def close(self) -> None:
        import ray

        for actor in self.actors:
            ray.kill(actor)

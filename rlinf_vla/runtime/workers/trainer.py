"""A trainer rank: it learns from rollouts or from demonstrations."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlinf_vla.algorithms.on_policy import Batch
from rlinf_vla.algorithms.parity import Parity
from rlinf_vla.config.cluster import CUDA
from rlinf_vla.core.devices import device_of, measured_memory
from rlinf_vla.core.types import Tensors, Trajectory
from rlinf_vla.runtime.on_policy_updater import OnPolicyUpdater
from rlinf_vla.runtime.workers.base import Builders, Worker, WorkerInfo, free_gpu, node_address
from rlinf_vla.runtime.workers.shards import HeavyParts, Packed, whole
from rlinf_vla.telemetry.timeline import Span, trainer_track
from rlinf_vla.training.checkpoint import begin_digests, load_checkpoint, save_checkpoint
from rlinf_vla.training.lora import rounded_weights
from rlinf_vla.training.trainer import Trainer

if TYPE_CHECKING:
    from rlinf_vla.algorithms.classifier import Frames
    from rlinf_vla.algorithms.sft import Demonstrations
    from rlinf_vla.runtime.ray.broadcast import Held, Order, Outbox


class TrainerWorker(Worker):
    """Trainer rank. Only a checkpoint can restore its trained weights and optimiser state."""

    def meeting_point(self) -> tuple[str, int]:
        """Open a store on this rank's machine, where the ranks form a process group."""
        from rlinf_vla.runtime.ray.broadcast import dist

        host = node_address()
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def ready(self, meeting_point: tuple[str, int] | None = None, ranks: int = 1) -> WorkerInfo:
        builders = self.builders
        cluster = self.builders.cluster
        self.ranks = ranks
        if meeting_point is not None:
            from rlinf_vla.runtime.ray.broadcast import dist

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
                from rlinf_vla.training.sharding import shard

                shard(self.policy)
            self.trainer = builders.trainer(self.policy)
        begin_digests(self.policy)
        self.algorithm = builders.algorithm()
        self.heavy = HeavyParts()
        weights, trained = (
            sum(parameter.numel() for parameter in group)
            for group in (self.policy.parameters(), self.trainer.parameters.values())
        )
        self.described = self.info(self.policy.spec, weights=weights, trained=trained)
        return self.described

    @cached_property
    def outbox(self) -> Outbox:
        """What broadcasts weights; its groups are formed after those of the ranks."""
        from rlinf_vla.runtime.ray.broadcast import Outbox

        return Outbox(self.builders.cluster.torch_device, node_address())

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
        from rlinf_vla.runtime.ray.broadcast import Held

        everything = self.acting_weights() if earlier is None else earlier.tensors()
        if self.place:
            return Held(), Packed({}), Packed({})
        if self.builders.settings.rounded:
            everything = rounded_weights(self.policy, everything)
        packed = Packed.of(everything)
        head = Packed({})
        if split:
            from rlinf_vla.rollout.split import head_weights

            head = Packed.of(head_weights(self.policy, everything))
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

    @contextmanager
    def updating(self) -> Iterator[dict[str, float]]:
        """Update in the context, with its threads; yield the metrics of its memory."""
        memory = measured_memory(device_of(self.trainer.policy))
        with self.builders.update_threads(), memory as peaks:
            yield peaks

    def show(self, demonstrations: Demonstrations) -> None:
        """Set the demonstrations for the imitation loss of updates."""
        self.learning.shown = demonstrations

    def step(self, batch: Demonstrations | Frames, rate: float) -> dict[str, float]:
        """Take one optimiser step on ``batch``; return its metrics."""
        from rlinf_vla.runtime.supervised import supervised_step

        with self.updating() as memory:
            metrics = supervised_step(self.trainer, self.builders.settings.run_seed, batch, rate)
        return metrics | memory

    def success_logits(self, frames: Frames) -> Tensor:
        from rlinf_vla.runtime.supervised import success_logits

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
        """Return metrics, ``OnPolicyUpdater.parity``, and the span of the work, in ``time.time``.

        ``algorithm``: the state of the driver's, which adapts it.
        """
        started = time.time()
        self.algorithm.restore(algorithm)
        with self.updating() as memory:
            batch = replace(batch, calls=self.heavy.complete(batch.calls))
            metrics = self.learning.update(
                batch, self.algorithm, value_only, iteration, version, self.progress
            )
        return (
            metrics | memory,
            self.learning.parity,
            Span("update", trainer_track(self.place, self.ranks), started, time.time()),
        )


def learning(builders: Builders, trainer: Trainer) -> OnPolicyUpdater:
    """Build the ``OnPolicyUpdater`` of a worker."""
    return OnPolicyUpdater(
        trainer,
        builders.settings.run_seed,
        builders.settings.temperature,
        builders.cluster.reuse_frozen,
    )

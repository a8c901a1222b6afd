"""The trainer on a cluster: its ranks as workers, and all of them as one."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlinf_vla.algorithms.on_policy import Batch
from rlinf_vla.algorithms.sft import Demonstrations
from rlinf_vla.flow.on_ray.judging import learning, whole
from rlinf_vla.flow.on_ray.pool import Patience, WorkerLost, wait
from rlinf_vla.flow.on_ray.wire import HeavyParts, Packed
from rlinf_vla.flow.on_ray.worker import HEALTH, Introduction, Worker, node_address, off_the_gpu
from rlinf_vla.rollout.split import head_weights
from rlinf_vla.training.checkpoint import load_checkpoint, save_checkpoint
from rlinf_vla.training.lora import network_dtype
from rlinf_vla.training.sharding import shard
from rlinf_vla.types import Trajectory


class TrainerWorker(Worker):
    """Has what cannot be computed again but from a checkpoint: trained weights and the optimiser's state."""

    def meeting_point(self) -> str:
        """Where the ranks find each other, on this one's machine."""
        host = node_address()
        with socket.socket() as free:
            free.bind((host, 0))
            return f"tcp://{host}:{free.getsockname()[1]}"

    def ready(self, meeting_point: str | None = None, ranks: int = 1) -> Introduction:
        builders = self.builders
        if meeting_point is not None:
            backend, patience = "nccl" if builders.device == "cuda" else "gloo", timedelta(seconds=builders.call_timeout_s)
            dist.init_process_group(backend, init_method=meeting_point, rank=self.place, world_size=ranks, timeout=patience)
        with builders.update_threads():
            self.policy = builders.policy()
            if builders.sharded:
                shard(self.policy)
            self.trainer = builders.trainer(self.policy)
        self.learning = learning(builders, self.trainer)
        self.algorithm, self.heavy = builders.algorithm(), HeavyParts()
        weights, trained = (sum(each.numel() for each in group) for group in (self.policy.parameters(), self.trainer.parameters.values()))
        return Introduction(os.getpid(), node_address(), self.policy.spec, weights, trained)

    def rest(self) -> None:
        """Off the GPU, with the optimiser's state, until there is work again."""
        off_the_gpu(self.policy)
        self.trainer.move("cpu")

    def wake(self) -> None:
        device = self.builders.device
        self.policy.to(device)
        self.trainer.move(device)

    def restore(self, checkpoint: Path) -> dict[str, Any]:
        """Its state. Raises UserError where it is damaged or belongs to another model."""
        return load_checkpoint(checkpoint, self.policy, self.trainer)

    def save(self, directory: Path, state: dict[str, Any], keep: int, earlier: dict[int, Packed]) -> None:
        versions = {version: packed.tensors() for version, packed in earlier.items()}
        save_checkpoint(directory, self.policy, self.trainer, state, keep, versions)

    def weights(self, earlier: Packed | None = None) -> tuple[int, Packed, Packed]:
        """Bytes of all that trains; all that trains; what of it belongs to the policy's head, where that can be parted with.

        ``earlier``: instead of the present ones.
        """
        everything = self.trainer.weights() if earlier is None else earlier.tensors()
        if self.builders.settings.rounded:
            dtype = network_dtype(self.policy)
            everything = {name: value.to(dtype) for name, value in everything.items()}
        packed = Packed.of(everything)
        head = Packed.of(head_weights(self.policy, everything)) if self.policy.inseparable is None else Packed({})
        return packed.nbytes, packed, head

    def accept(self, serial: int, heavy: Packed) -> None:
        """Of a shard; from now on this worker has it, whatever becomes of who played it."""
        self.heavy.add(serial, heavy)

    def forget(self, serials: Sequence[int]) -> None:
        self.heavy.forget(serials)

    def reference(self, calls: Trajectory, heavy: Packed) -> Packed:
        """As a reference worker's, where there is none."""
        with self.builders.update_threads():
            return Packed.of({"reference": self.learning.reference(whole(calls, heavy, self.policy)).reshape(calls.log_prob.shape)})

    def show(self, demonstrations: Demonstrations) -> None:
        """For updates that imitate beside."""
        self.learning.shown = demonstrations

    def update(self, batch: Batch, value_only: bool, iteration: int, version: int) -> tuple[dict[str, float], float | None, float]:
        """Metrics, how well ``evaluate`` found the rollout's log-probabilities again, and the seconds taken."""
        started = time.perf_counter()
        with self.builders.update_threads():
            device = next(self.policy.parameters()).device
            batch = replace(batch.to(device), calls=self.heavy.complete(batch.calls, device))
            metrics = self.learning.update(batch, self.algorithm, value_only, iteration, version)
        return metrics, self.learning.parity, time.perf_counter() - started


class TrainerLost(RuntimeError):
    """What it knew is in the last complete checkpoint only."""


class Trainers:
    """The trainer's ranks, which do everything together."""

    def __init__(self, actors: Sequence[Any], patience: Patience) -> None:
        self.actors, self._patience = actors, replace(patience, heartbeat=patience.start, call=patience.start)
        meeting_point = wait(actors[0], [actors[0].meeting_point.remote()], self._patience, "trainer 0") if len(actors) > 1 else []
        self.introduction: Introduction = self.call("ready", *meeting_point, *([len(actors)] if meeting_point else []))[0][0]
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
        except Exception as error:
            lost = self._lost()
            if lost is None:
                raise
            raise TrainerLost(lost) from error  # the others only failed to talk to it

    def _lost(self) -> str | None:
        if len(self.actors) == 1:
            return None
        for rank, actor in enumerate(self.actors):
            try:
                wait(actor, [actor.ping.options(concurrency_group=HEALTH).remote()], self._patience, f"trainer {rank}")
            except WorkerLost as loss:
                return str(loss)
        return None

    def close(self) -> None:
        import ray

        for actor in self.actors:
            ray.kill(actor)

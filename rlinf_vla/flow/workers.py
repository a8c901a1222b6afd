"""What runs on a cluster: plain classes, which the Ray runtime makes actors of. ``ready`` does what is slow, so that errors are told."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlinf_vla.algorithms.on_policy import Batch, OnPolicy
from rlinf_vla.algorithms.sft import DemonstrationConfig, Demonstrations
from rlinf_vla.evaluation.sweep import EpisodeResult, sweep
from rlinf_vla.flow.learning import Learning
from rlinf_vla.flow.wire import ROW, HeavyParts, Packed, heavy_part, light_part
from rlinf_vla.protocols import EnvSpec, Policy, PolicySpec, VectorEnv
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.collector import collect, collect_episodes
from rlinf_vla.rollout.demonstrations import demonstrate
from rlinf_vla.telemetry.timeline import Span, Timeline
from rlinf_vla.training.checkpoint import load_checkpoint, save_checkpoint
from rlinf_vla.training.lora import merged_lora
from rlinf_vla.training.trainer import Trainer
from rlinf_vla.types import Episodes, Trajectory

Threads = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Builders:
    """How a worker makes its parts; functions of importable modules, so that another machine finds them."""

    policy: Callable[[], Policy]
    """With the weights that the run begins with."""
    environments: Callable[[Policy], AbstractContextManager[tuple[Sequence[VectorEnv], Sequence[VectorEnv]]]]
    """A rollout worker's groups: as they are, and worth what the recipe's reward says."""
    trainer: Callable[[Policy], Any]
    algorithm: Callable[[], OnPolicy]
    settings: Settings
    reuse_frozen: bool
    rollout_threads: Threads
    update_threads: Threads


@dataclass(frozen=True)
class Introduction:
    pid: int
    host: str
    policy: PolicySpec
    weights: int = 0
    trained: int = 0
    env: EnvSpec | None = None


@dataclass(frozen=True)
class Played:
    """``light``: of a shard. Spans in seconds of ``time.time``; ``load_s``: taken by new weights."""

    light: Packed
    spans: list[Span]
    load_s: float


class Worker:
    def __init__(self, builders: Builders, place: int) -> None:
        """``place``: its number among the workers of its role."""
        self.builders, self.place = builders, place

    def ping(self) -> None:
        """Answered beside the work."""

    def pid(self) -> int:
        return os.getpid()


class RolloutWorker(Worker):
    """Stateless but for its simulators, which every rollout resets, and the weights that it was given last."""

    version: int | None = None

    def ready(self) -> Introduction:
        builders, stack = self.builders, ExitStack()
        with builders.rollout_threads():
            self.policy = builders.policy()
            self.groups, self.rewarded = stack.enter_context(builders.environments(self.policy))
        self.actor = Actor(self.policy, builders.settings)
        self._merged, self._stack = ExitStack(), stack
        return self.introduce()

    def introduce(self) -> Introduction:
        return Introduction(os.getpid(), socket.gethostname(), self.policy.spec, env=self.groups[0].spec)

    def load(self, version: int, weights: Packed | None) -> float:
        """The policy's ``version``; its adapters stand merged from now on. None: the weights that the run begins with. Seconds taken."""
        if version == self.version:
            return 0.0
        started = time.perf_counter()
        self._merged.close()
        if weights is not None:
            put(self.policy, weights)
        self._merged.enter_context(merged_lora(self.policy))
        self.version = version
        return time.perf_counter() - started

    def collect(self, version: int, weights: Packed | None, iteration: int, first: int, calls: int) -> tuple[Played, Packed]:
        """The rollout of the environments from number ``first`` on: its light part, and its heavy one."""
        return self._play(
            version, weights, lambda timeline: collect(self.actor, self.rewarded, iteration, version, calls, timeline, first=first)
        )

    def collect_episodes(self, version: int, weights: Packed | None, episodes: Episodes) -> tuple[Played, Packed]:
        return self._play(version, weights, lambda timeline: collect_episodes(self.actor, self.rewarded, episodes, version, timeline))

    def _play(self, version: int, weights: Packed | None, play: Callable[[Timeline], Trajectory]) -> tuple[Played, Packed]:
        timeline = Timeline()
        with self.builders.rollout_threads():
            seconds = self.load(version, weights)
            rollouts = play(timeline)
        spans = [each._replace(track=f"rollout {self.place} {each.track}") for each in shifted(timeline.spans(), clock_offset())]
        return Played(light_part(rollouts), spans, seconds), heavy_part(rollouts)

    def sweep(self, version: int, weights: Packed | None, numbers: range, temperature: float, filmed: int) -> list[EpisodeResult]:
        """Evaluation episodes ``numbers``; those below ``filmed`` on film."""
        with self.builders.rollout_threads():
            self.load(version, weights)
            actor = Actor(self.policy, replace(self.builders.settings, temperature=temperature))
            return sweep(actor, self.groups, numbers, Timeline(), filmed)

    def demonstrate(self, config: DemonstrationConfig) -> tuple[Demonstrations, float | None]:
        with self.builders.rollout_threads():
            return demonstrate(self.policy, self.groups, config, self.builders.settings.run_seed)


class ReferenceWorker(Worker):
    """The policy as it was before the first update."""

    def ready(self) -> Introduction:
        with self.builders.update_threads():
            self.policy = self.builders.policy()
            self.learning = learning(self.builders, self.builders.trainer(self.policy))
        return Introduction(os.getpid(), socket.gethostname(), self.policy.spec)

    def reference(self, calls: Trajectory, heavy: Packed) -> Packed:
        """Log-probabilities of a shard, shaped as its own."""
        with self.builders.update_threads():
            return Packed.of({"reference": self.learning.log_prob(whole(calls, heavy, self.policy)).reshape(calls.log_prob.shape)})


class TrainerWorker(Worker):
    """Has what cannot be computed again but from a checkpoint: trained weights and the optimiser's state."""

    def ready(self) -> Introduction:
        builders = self.builders
        with builders.update_threads():
            self.policy = builders.policy()
            self.trainer = builders.trainer(self.policy)
        self.learning = learning(builders, self.trainer)
        self.algorithm, self.heavy = builders.algorithm(), HeavyParts()
        weights, trained = (sum(each.numel() for each in group) for group in (self.policy.parameters(), self.trainer.parameters.values()))
        return Introduction(os.getpid(), socket.gethostname(), self.policy.spec, weights, trained)

    def restore(self, checkpoint: Path) -> dict[str, Any]:
        """Its state. Raises UserError where it is damaged or belongs to another model."""
        return load_checkpoint(checkpoint, self.policy, self.trainer)

    def save(self, directory: Path, state: dict[str, Any], keep: int) -> None:
        save_checkpoint(directory, self.policy, self.trainer, state, keep)

    def weights(self) -> tuple[int, Packed]:
        """All that trains, and how many bytes that is."""
        packed = Packed.of(dict(self.trainer.parameters))
        return packed.nbytes, packed

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


def learning(builders: Builders, trainer: Trainer) -> Learning:
    return Learning(trainer, builders.settings.run_seed, builders.settings.temperature, builders.reuse_frozen)


def whole(calls: Trajectory, heavy: Packed, policy: Policy) -> Trajectory:
    """``[N]``: a light shard with its heavy part, where the policy is."""
    parts = HeavyParts()
    parts.add(0, heavy)
    flat = calls.flatten() if calls.value.ndim == 2 else calls
    return parts.complete(replace(flat, inputs={ROW: torch.arange(len(flat))}), next(policy.parameters()).device)


@torch.no_grad()
def put(policy: Policy, weights: Packed) -> None:
    """Into the policy's parameters of the same names."""
    own = dict(policy.named_parameters())
    for name, value in weights.tensors().items():
        own[name].copy_(value)


def clock_offset() -> float:
    """Seconds from ``time.perf_counter``, which is one machine's own, to ``time.time``."""
    return time.time() - time.perf_counter()


def shifted(spans: Sequence[Span], seconds: float) -> list[Span]:
    return [span._replace(start=span.start + seconds, end=span.end + seconds) for span in spans]

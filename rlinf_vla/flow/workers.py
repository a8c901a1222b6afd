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
from rlinf_vla.flow.wire import ROW, HeavyParts, Packed, flattened, heavy_parts, light_part
from rlinf_vla.protocols import EnvSpec, Policy, PolicySpec, VectorEnv
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.collector import Beside, collect, collect_episodes
from rlinf_vla.rollout.demonstrations import demonstrate
from rlinf_vla.rollout.rewarded import Worth, scored, seen
from rlinf_vla.rollout.split import FeatureServer, SplitActor, fill_head, head_weights
from rlinf_vla.telemetry.timeline import Span, Timeline
from rlinf_vla.training.checkpoint import load_checkpoint, save_checkpoint
from rlinf_vla.training.lora import merged_lora
from rlinf_vla.training.trainer import Trainer
from rlinf_vla.types import Episodes, Inputs, Tensors, Trajectory

Threads = Callable[[], AbstractContextManager[None]]
HEALTH = "health"
"""The concurrency group in which a worker answers ``ping`` while it works."""
START_S = 60.0
"""For a process to start, before it can answer."""


@dataclass(frozen=True)
class Builders:
    """How a worker makes its parts; functions of importable modules, so that another machine finds them."""

    policy: Callable[[], Policy]
    """With the weights that the run begins with."""
    head: Callable[[], Policy]
    """What ``rollout.split.keep_head`` leaves of it, its weights still to be filled in."""
    environments: Callable[[Policy], AbstractContextManager[tuple[Sequence[VectorEnv], Sequence[VectorEnv]]]]
    """A rollout worker's groups: as they are, and worth what the recipe's reward says."""
    trainer: Callable[[Policy], Any]
    algorithm: Callable[[], OnPolicy]
    worth: Callable[[EnvSpec], Worth]
    """What steps are worth, for reward workers."""
    rewards_apart: bool
    """Reward workers say what steps are worth, not the rollout workers."""
    device: str
    heartbeat_s: float
    settings: Settings
    reuse_frozen: bool
    rollout_threads: Threads
    update_threads: Threads


@dataclass(frozen=True)
class Introduction:
    pid: int
    host: str
    policy: PolicySpec | None
    weights: int = 0
    trained: int = 0
    env: EnvSpec | None = None


@dataclass(frozen=True)
class Weights:
    """A version of what trains, as it travels. backbone: where a feature worker finds its own, a reference that nobody else follows."""

    version: int
    backbone: Any = None


@dataclass(frozen=True)
class Played:
    """``light``: of a shard. Spans in seconds of ``time.time``; ``load_s``: taken by new weights. Bytes to a feature worker and back."""

    light: Packed
    spans: list[Span]
    load_s: float
    sent: int
    received: int


class Worker:
    def __init__(self, builders: Builders, place: int) -> None:
        """``place``: its number among the workers of its role."""
        self.builders, self.place = builders, place

    def ping(self) -> None:
        """Answered beside the work."""

    def pid(self) -> int:
        return os.getpid()


class ActingWorker(Worker):
    """Has the policy, or its head, in the version that it was given last."""

    policy: Policy
    version: int | None = None

    def __init__(self, builders: Builders, place: int) -> None:
        super().__init__(builders, place)
        self._merged = ExitStack()

    def load(self, version: int, weights: Packed) -> float:
        """Adapters stand merged from now on. Returns the seconds taken."""
        if version == self.version:
            return 0.0
        started = time.perf_counter()
        self.unmerge()
        put(self.policy, weights)
        self._merged.enter_context(merged_lora(self.policy))
        self.version = version
        return time.perf_counter() - started

    def unmerge(self) -> None:
        self._merged.close()
        self.version = None


class FeatureWorker(ActingWorker):
    """A split policy's backbone, beside the trainer."""

    server: FeatureServer | None = None

    def ready(self) -> Introduction:
        """Where nobody asked for it, because this process stands in for a lost one, the first work does."""
        with self.builders.rollout_threads():
            self.policy = self.builders.policy()
        self.server = FeatureServer(self.policy, self.builders.settings.cuda_graphs)
        return Introduction(os.getpid(), socket.gethostname(), self.policy.spec)

    def head(self) -> Packed:
        """The head's weights, those included that never change."""
        if self.server is None:
            self.ready()
        self.unmerge()
        return Packed.of(head_weights(self.policy, self.policy.state_dict()))

    def encode(self, weights: Weights, inputs: Packed) -> Packed:
        """Features under this version of the weights."""
        if self.server is None:
            self.ready()
        assert self.server is not None
        with self.builders.rollout_threads():
            if weights.version != self.version:
                self.load(weights.version, followed(weights.backbone))
            return Packed.of(self.server.encode(inputs.tensors()))


class RolloutWorker(ActingWorker):
    """Stateless but for its simulators, which every rollout resets."""

    weights: Weights

    def __init__(self, builders: Builders, place: int, features: Any = None) -> None:
        """``features``: the feature worker that has this one's backbone; None: the policy is whole here."""
        super().__init__(builders, place)
        self.features = features

    def ready(self) -> Introduction:
        builders = self.builders
        with builders.rollout_threads():
            if self.features is None:
                self.policy = builders.policy()
            else:
                self.policy = builders.head()
                head = asked(self.features, "head", (), builders.heartbeat_s).tensors()
                fill_head(self.policy, head, builders.device)
            self._environments = builders.environments(self.policy)
            self.groups, self.rewarded = self._environments.__enter__()
        self.actor = self.actor_at(builders.settings.temperature)
        return self.introduce()

    def introduce(self) -> Introduction:
        return Introduction(os.getpid(), socket.gethostname(), self.policy.spec, env=self.groups[0].spec)

    def actor_at(self, temperature: float) -> Actor:
        settings = replace(self.builders.settings, temperature=temperature)
        return Actor(self.policy, settings) if self.features is None else SplitActor(self.policy, settings, self._encode)

    def _encode(self, inputs: Inputs) -> Tensors:
        return asked(self.features, "encode", (self.weights, Packed.of(inputs)), self.builders.heartbeat_s).tensors()

    def collect(self, weights: Weights, own: Packed, iteration: int, first: int, calls: int) -> tuple[Played, Packed, Packed]:
        """The rollout of the environments from number ``first`` on: its light part, and what the policy and what a reward reads of it.

        ``own``: what trains of this worker's part of the policy.
        """

        def play(groups: Sequence[VectorEnv], timeline: Timeline, beside: Beside) -> Trajectory:
            return collect(self.actor, groups, iteration, weights.version, calls, timeline, first=first, beside=beside)

        return self._play(weights, own, play)

    def collect_episodes(self, weights: Weights, own: Packed, episodes: Episodes) -> tuple[Played, Packed, Packed]:
        def play(groups: Sequence[VectorEnv], timeline: Timeline, beside: Beside) -> Trajectory:
            return collect_episodes(self.actor, groups, episodes, weights.version, timeline, beside=beside)

        return self._play(weights, own, play)

    def _play(
        self, weights: Weights, own: Packed, play: Callable[[Sequence[VectorEnv], Timeline, Beside], Trajectory]
    ) -> tuple[Played, Packed, Packed]:
        timeline, apart = Timeline(), self.builders.rewards_apart
        if isinstance(self.actor, SplitActor):
            self.actor.sent = self.actor.received = 0
        with self.builders.rollout_threads():
            self.weights, seconds = weights, self.load(weights.version, own)
            rollouts = play(self.groups if apart else self.rewarded, timeline, seen if apart else lambda call: {})
        spans = [each._replace(track=f"rollout {self.place} {each.track}") for each in shifted(timeline.spans(), clock_offset())]
        crossed = (self.actor.sent, self.actor.received) if isinstance(self.actor, SplitActor) else (0, 0)
        return Played(light_part(rollouts), spans, seconds, *crossed), *heavy_parts(rollouts)

    def sweep(self, weights: Weights, own: Packed, numbers: range, temperature: float, filmed: int) -> list[EpisodeResult]:
        """Evaluation episodes ``numbers``; those below ``filmed`` on film."""
        with self.builders.rollout_threads():
            self.weights = weights
            self.load(weights.version, own)
            return sweep(self.actor_at(temperature), self.groups, numbers, Timeline(), filmed)

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


class RewardWorker(Worker):
    """Says what the steps of a rollout were worth."""

    worth: Worth | None = None

    def ready(self) -> Introduction:
        return Introduction(os.getpid(), socket.gethostname(), None)

    def score(self, calls: Trajectory, scene: Packed, env: EnvSpec) -> Packed:
        """Rewards of a shard, shaped as its own. ``env``: of an environment group."""
        with self.builders.update_threads():
            if self.worth is None:
                self.worth = self.builders.worth(env)
            return Packed.of({"reward": scored(flattened(calls), scene.tensors(), self.worth, env.num_envs).reshape(calls.reward.shape)})


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

    def weights(self) -> tuple[int, Packed, Packed]:
        """Bytes of all that trains; all that trains; what of it belongs to the policy's head, where that can be parted with."""
        everything: Tensors = {name: value.detach() for name, value in self.trainer.parameters.items()}
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


def learning(builders: Builders, trainer: Trainer) -> Learning:
    return Learning(trainer, builders.settings.run_seed, builders.settings.temperature, builders.reuse_frozen)


def whole(calls: Trajectory, heavy: Packed, policy: Policy) -> Trajectory:
    """``[N]``: a light shard with its heavy part, where the policy is."""
    parts = HeavyParts()
    parts.add(0, heavy)
    flat = flattened(calls)
    return parts.complete(replace(flat, inputs={ROW: torch.arange(len(flat))}), next(policy.parameters()).device)


def asked(actor: Any, method: str, arguments: tuple[Any, ...], heartbeat_s: float) -> Any:
    """What another worker, which Ray itself restarts, answers. One that hangs is killed first."""
    import ray
    from ray import exceptions

    while True:
        ref = getattr(actor, method).remote(*arguments)
        try:
            while not ray.wait([ref], timeout=heartbeat_s)[0]:
                ray.get(actor.ping.options(concurrency_group=HEALTH).remote(), timeout=heartbeat_s + START_S)
            return ray.get(ref)
        except exceptions.GetTimeoutError:
            ray.kill(actor, no_restart=False)
        except exceptions.ActorUnavailableError:
            continue


def followed(reference: Any) -> Packed:
    import ray

    return ray.get(reference)


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

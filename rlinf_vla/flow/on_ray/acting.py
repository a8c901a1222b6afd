"""Workers that act: rollout workers with their simulators, and feature workers with the backbone of a split policy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from rlinf_vla.algorithms.sft import DemonstrationConfig, Demonstrations
from rlinf_vla.evaluation.sweep import EpisodeResult, sweep
from rlinf_vla.flow.on_ray.wire import Packed, heavy_parts, light_part
from rlinf_vla.flow.on_ray.worker import (
    Builders,
    Introduction,
    Worker,
    asked,
    clock_offset,
    followed,
    node_address,
    off_the_gpu,
    put,
    shifted,
)
from rlinf_vla.protocols import Policy, VectorEnv
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.rollout.collector import Beside, collect, collect_episodes
from rlinf_vla.rollout.demonstrations import demonstrate
from rlinf_vla.rollout.rewarded import seen
from rlinf_vla.rollout.split import FeatureServer, SplitActor, fill_head, head_weights
from rlinf_vla.telemetry.timeline import Span, Timeline
from rlinf_vla.training.lora import merged_lora
from rlinf_vla.types import Episodes, Inputs, Tensors, Trajectory


@dataclass(frozen=True)
class Weights:
    """A version of what trains, as it travels. everything: a reference, which only a feature worker follows."""

    version: int
    everything: Any


@dataclass(frozen=True)
class Played:
    """``light``: of a shard. Spans in seconds of ``time.time``; ``load_s``: taken by new weights. nbytes: of
    the rest of the shard. sent, received: bytes to a feature worker and back."""

    light: Packed
    spans: list[Span]
    load_s: float
    nbytes: int
    sent: int
    received: int


class ActingWorker(Worker):
    """Has the policy, or its head, in the version that it was given last."""

    policy: Policy
    version: int | None = None
    resting = False

    def __init__(self, builders: Builders, place: int) -> None:
        super().__init__(builders, place)
        self._merged = ExitStack()

    def load(self, version: int, weights: Packed) -> float:
        """Adapters stand merged from now on. Returns the seconds taken."""
        if version == self.version:
            return 0.0
        started = time.perf_counter()
        self.unmerge()
        if self.resting:
            self.resting = False
            self.policy.to(self.builders.device)
            self.wake()
        put(self.policy, weights)
        self._merged.enter_context(merged_lora(self.policy))
        self.version = version
        return time.perf_counter() - started

    def rest(self) -> None:
        """Off the GPU, until there is work again."""
        self.unmerge()
        off_the_gpu(self.policy)
        self.resting = True

    def wake(self) -> None:
        """The policy is back, in other places of the GPU's memory."""

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
        self.wake()
        return Introduction(os.getpid(), node_address(), self.policy.spec)

    def wake(self) -> None:
        self.server = FeatureServer(self.policy, self.builders.settings.cuda_graphs)

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
                self.load(weights.version, followed(weights.everything))
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
        self.wake()
        return self.introduce()

    def wake(self) -> None:
        self.actor = self.actor_at(self.builders.settings.temperature)

    def introduce(self) -> Introduction:
        return Introduction(os.getpid(), node_address(), self.policy.spec, env=self.groups[0].spec)

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
        heavy, scene = heavy_parts(rollouts)
        return Played(light_part(rollouts), spans, seconds, heavy.nbytes + scene.nbytes, *crossed), heavy, scene

    def sweep(self, weights: Weights, own: Packed, numbers: range, temperature: float, filmed: int) -> list[EpisodeResult]:
        """Evaluation episodes ``numbers``; those below ``filmed`` on film."""
        with self.builders.rollout_threads():
            self.weights = weights
            self.load(weights.version, own)
            return sweep(self.actor_at(temperature), self.groups, numbers, Timeline(), filmed)

    def demonstrate(self, config: DemonstrationConfig) -> tuple[Demonstrations, float | None]:
        with self.builders.rollout_threads():
            return demonstrate(self.policy, self.groups, config, self.builders.settings.run_seed)

"""Workers that run the policy: rollout workers, and feature workers for a split backbone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from rlinf_vla.core.devices import share_cores
from rlinf_vla.core.protocols import Policy, RewardModel
from rlinf_vla.core.transitions import EpisodeRecords
from rlinf_vla.core.types import Episodes, Inputs, Tensors, Trajectory
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.rollout.collector import CallCounts, collect, collect_episodes
from rlinf_vla.rollout.evaluation_episodes import EpisodeResult, play_evaluation
from rlinf_vla.rollout.player import Call
from rlinf_vla.rollout.reward_shaping import seen
from rlinf_vla.runtime.workers.base import (
    Builders,
    Worker,
    WorkerInfo,
    clock_offset,
    fetched,
    load_weights,
    node_address,
    off_the_gpu,
    shifted,
)
from rlinf_vla.runtime.workers.shards import Packed, heavy_parts, light_part, parts
from rlinf_vla.telemetry.timeline import Span, Timeline
from rlinf_vla.training.lora import merged_lora

if TYPE_CHECKING:
    from rlinf_vla.algorithms.base import DemonstrationConfig
    from rlinf_vla.algorithms.classifier import Frames
    from rlinf_vla.algorithms.sft import Demonstrations
    from rlinf_vla.algorithms.value import Returns
    from rlinf_vla.rollout.split import FeatureServer
    from rlinf_vla.rollout.transitions import ChunkRewards
    from rlinf_vla.runtime.ray.broadcast import Inbox, Layout, Order, Received

Recorded = tuple[list[tuple[Packed, bool, int, float | None, int]], list[Span], dict[str, int]]
"""The fields of ``EpisodeRecords`` of each episode, the spans of their rollout, and the totals of
``CallCounts``."""
Member = tuple[str, int]
"""A worker: address of its machine and process id."""


@dataclass(frozen=True)
class Weights:
    """A version of the trained weights, as references to the object store.

    everything: for feature workers. own: for rollout workers, except for the ``receivers`` to which
    it is broadcast."""

    version: int
    everything: Any
    own: Any
    receivers: frozenset[Member] = frozenset()


@dataclass(frozen=True)
class ShardDone:
    """The light part of a shard, and statistics of its rollout.

    spans: in seconds of ``time.time``. steps: control steps. load_s: seconds to load new weights.
    nbytes: size of the heavy parts. sent, received: bytes to and from a feature worker. counts: of
    ``CallCounts``."""

    light: Packed
    spans: list[Span]
    steps: int
    load_s: float
    nbytes: int
    sent: int
    received: int
    counts: dict[str, int]

    @property
    def seconds(self) -> float:
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)


class PolicyWorker(Worker):
    """Worker with the policy, or its head, in the version that it received last."""

    policy: Policy
    version: int | None = None
    resting = False

    def __init__(self, builders: Builders, place: int) -> None:
        super().__init__(builders, place)
        self._merged = ExitStack()

    def load(self, version: int, fetch: Callable[[], Tensors]) -> float:
        """Fetch weights and merge adapters, unless present; return the seconds taken."""
        if version == self.version:
            return 0.0
        started = time.perf_counter()
        self.unmerge()
        if self.resting:
            self.resting = False
            self.policy.to(self.builders.cluster.torch_device)
            self.wake()
        load_weights(self.policy, fetch())
        self._merged.enter_context(merged_lora(self.policy))
        self.version = version
        return time.perf_counter() - started

    def rest(self) -> None:
        """Move the policy off the GPU until there is work again."""
        self.unmerge()
        self.sleep()
        off_the_gpu(self.policy)
        self.resting = True

    def sleep(self) -> None:
        """Called before the policy leaves the GPU: free what was recorded there."""

    def wake(self) -> None:
        """Called when the policy is back on the GPU, at other addresses."""

    def unmerge(self) -> None:
        self._merged.close()
        self.version = None


class FeatureWorker(PolicyWorker):
    """Worker with a split policy's backbone, in a trainer rank's place."""

    server: FeatureServer | None = None

    def ready(self) -> WorkerInfo:
        """Load the policy, unless the call of a rollout worker arrived before and did."""
        if self.server is None:
            with self.builders.rollout_threads():
                self.policy = self.builders.learner()
            self.wake()
        return self.info(self.policy.spec)

    def sleep(self) -> None:
        if self.server is not None:
            self.server.forget()

    def wake(self) -> None:
        from rlinf_vla.rollout.split import FeatureServer

        self.server = FeatureServer(self.policy, self.builders.settings.cuda_graphs)

    def head(self) -> Packed:
        """Return the weights of the action head, including those that never change."""
        from rlinf_vla.rollout.split import head_weights

        self.ready()
        self.unmerge()
        return Packed.of(head_weights(self.policy, self.policy.state_dict()))

    def encode(self, weights: Weights, inputs: Packed) -> Packed:
        """Return the features of ``inputs`` under this version of the weights."""
        assert self.server is not None
        with self.builders.rollout_threads():
            self.load(weights.version, lambda: fetched(weights.everything).tensors())
            return Packed.of(self.server.encode(inputs.tensors()))


class RolloutWorker(PolicyWorker):
    """Worker with a policy and simulators. It is stateless: every rollout resets simulators.

    If a reward model is trained, the worker has this instead of a policy, and only labels frames.
    """

    weights: Weights
    model: RewardModel

    def __init__(self, builders: Builders, place: int, features: Any = None) -> None:
        """``features``: feature worker with this worker's backbone; None: the policy is whole."""
        super().__init__(builders, place)
        self.features = features
        self._open = ExitStack()

    def ready(self) -> WorkerInfo:
        builders = self.builders
        share_cores(builders.neighbours)
        with builders.rollout_threads():
            self.groups, self.rewarded = self._open.enter_context(builders.environments())
            if self.features is None:
                learner = builders.learner()
            else:
                from rlinf_vla.rollout.split import load_head

                learner = builders.head()
                patience = builders.cluster.start_timeout_s
                head = self._ask_features(patience, "head").tensors()
                load_head(learner, head, builders.cluster.torch_device)
            self._spec = learner.spec
            if isinstance(learner, RewardModel):
                self.model = learner
                return self.worker_info()
            self.policy = learner
            if self.groups:
                self.policy.fit_instructions(self.groups[0].spec.instructions)
        self.wake()
        return self.worker_info()

    def close(self) -> None:
        """End the simulators. A process of its own does not need it."""
        self._open.close()

    def sleep(self) -> None:
        self.actor.forget()

    def wake(self) -> None:
        self.actor = self.actor_at(self.builders.settings.temperature)

    def worker_info(self) -> WorkerInfo:
        return self.info(self._spec, env=self.groups[0].spec if self.groups else None)

    def actor_at(self, temperature: float) -> Actor:
        settings = replace(self.builders.settings, temperature=temperature)
        return Actor(self.policy, settings, None if self.features is None else self._encode)

    def _encode(self, inputs: Inputs) -> Tensors:
        patience = self.builders.cluster.heartbeat_s
        return self._ask_features(patience, "encode", self.weights, Packed.of(inputs)).tensors()

    def _ask_features(self, patience: float, method: str, *arguments: Any) -> Packed:
        """Call the feature worker, which is lost if it is silent for ``patience`` seconds.

        Raises WorkerLost. The pool then starts another rollout worker, which repeats the work.
        """
        from rlinf_vla.runtime.ray.pool import wait

        cluster = replace(self.builders.cluster, heartbeat_s=patience)
        reference = getattr(self.features, method).remote(*arguments)
        answer: Packed = wait(self.features, [reference], cluster, "its feature worker")[0]
        return answer

    @cached_property
    def inbox(self) -> Inbox:
        from rlinf_vla.runtime.ray.broadcast import Inbox

        return Inbox(self.builders.cluster.broadcast_device, node_address())

    def receive(self, rank: int, order: Order, layout: Layout, oldest: int) -> Received:
        """See ``Inbox.receive``; it may run while this worker does anything else."""
        return self.inbox.receive(rank, order, layout, oldest)

    def collect(
        self, weights: Weights, iteration: int, first: int, calls: int
    ) -> tuple[ShardDone, Packed, Packed]:
        """Roll out the environments from number ``first`` on.

        Returns the light part, what only the policy reads, and what only a reward reads.
        """

        return self._play(
            weights,
            lambda groups, **how: collect(
                self.actor, groups, iteration, weights.version, calls, first=first, **how
            ),
        )

    def collect_episodes(
        self, weights: Weights, episodes: Episodes
    ) -> tuple[ShardDone, Packed, Packed]:
        return self._play(
            weights,
            lambda groups, **how: collect_episodes(
                self.actor, groups, episodes, weights.version, **how
            ),
        )

    def _play(
        self, weights: Weights, play: Callable[..., Trajectory]
    ) -> tuple[ShardDone, Packed, Packed]:
        timeline = Timeline()
        apart = self.builders.rewards_apart
        counts = CallCounts(self.groups[0].spec, self.policy)

        def beside(call: Call) -> Tensors:
            counts.add(call)
            return seen(call) if apart else {}

        if self.features is not None:
            self.actor.sent = self.actor.received = 0
        with self._acting(weights) as seconds:
            rollouts = play(
                self.groups if apart else self.rewarded,
                spans=timeline,
                beside=beside,
                progress=self.progress,
            )
        spans = self._spans(timeline)
        steps = int(rollouts.valid.sum())
        crossed = (self.actor.sent, self.actor.received) if self.features is not None else (0, 0)
        heavy, scene = heavy_parts(rollouts)
        return (
            ShardDone(
                light_part(rollouts),
                spans,
                steps,
                seconds,
                heavy.nbytes + scene.nbytes,
                *crossed,
                counts.totals(),
            ),
            heavy,
            scene,
        )

    def play_evaluation(
        self, weights: Weights, numbers: range, temperature: float, filmed: int, probe: str | None
    ) -> list[EpisodeResult]:
        """Play evaluation episodes ``numbers``; record the frames of those below ``filmed``."""
        with self._acting(weights):
            return play_evaluation(
                self.actor_at(temperature),
                self.groups,
                numbers,
                Timeline(),
                filmed,
                self.progress,
                probe,
            )

    def collect_transitions(
        self, weights: Weights, episodes: Episodes, rewards: ChunkRewards, expert: bool
    ) -> Recorded:
        """Run ``episodes`` to their end, by the policy or by the scripted expert."""
        from rlinf_vla.rollout.transitions import record_transitions

        play = partial(record_transitions, rewards=rewards, expert=expert)
        return self._recorded(weights, episodes, play)

    def visit(self, weights: Weights, episodes: Episodes, beta: float | None) -> Recorded:
        """Run ``episodes`` to their end, and label their states; see ``record_visits``."""
        from rlinf_vla.rollout.visits import record_visits

        return self._recorded(weights, episodes, partial(record_visits, beta=beta))

    def _recorded(
        self, weights: Weights, episodes: Episodes, play: Callable[..., list[EpisodeRecords]]
    ) -> Recorded:
        timeline = Timeline()
        counts = CallCounts(self.groups[0].spec, self.policy)
        with self._acting(weights):
            records = play(
                self.policy,
                self.actor,
                self.rewarded,
                episodes,
                spans=timeline,
                progress=self.progress,
                watch=counts.add,
            )
        return (
            [
                (
                    Packed.of(episode.records),
                    episode.success,
                    episode.steps,
                    episode.cost,
                    episode.fault,
                )
                for episode in records
            ],
            self._spans(timeline),
            counts.totals(),
        )

    @contextmanager
    def _acting(self, weights: Weights) -> Iterator[float]:
        """Act with these weights; yield the seconds that it took to load them."""
        with self.builders.rollout_threads():
            self.weights = weights
            seconds = self.load(weights.version, lambda: self._fetch(weights))
            with self.inbox.busy.working():
                yield seconds

    def _fetch(self, weights: Weights) -> Tensors:
        """Return what was broadcast to this worker, else what is in the object store."""
        broadcast = (node_address(), self.pid()) in weights.receivers
        arrived = self.inbox.take(weights.version) if broadcast else None
        return fetched(weights.own).tensors() if arrived is None else arrived

    def _spans(self, timeline: Timeline) -> list[Span]:
        """Return the spans under this worker's name, in seconds of ``time.time``."""
        return [
            span._replace(track=f"rollout {self.place} {span.track}")
            for span in shifted(timeline.spans(), clock_offset())
        ]

    def demonstrate(
        self, config: DemonstrationConfig, augmented: bool = False
    ) -> tuple[Demonstrations, float | None]:
        from rlinf_vla.rollout.demonstrations import collect_demonstrations

        with self.builders.rollout_threads():
            return collect_demonstrations(
                self.policy,
                self.groups,
                config,
                self.builders.settings.run_seed,
                self.progress,
                augmented,
            )

    def returns(
        self, config: DemonstrationConfig, failure: float
    ) -> tuple[Returns, dict[str, int]]:
        from rlinf_vla.data.value_labels import dataset_returns

        with self.builders.rollout_threads():
            return dataset_returns(self.policy, config, failure, self.progress)

    def label(self, config: DemonstrationConfig) -> Frames:
        from rlinf_vla.rollout.demonstrations import labelled_frames

        with self.builders.rollout_threads():
            return labelled_frames(
                self.model, self.groups, config, self.builders.settings.run_seed, self.progress
            )


def evaluate_on(
    pool: Any,
    weights: Weights,
    size: int,
    episodes: int,
    temperature: float,
    filmed: int,
    progress: Callable[[float], None],
    probe: str | None,
) -> list[EpisodeResult]:
    """Run the first ``episodes`` evaluation episodes on the pool's workers, ``size`` in a call."""
    shards = [range(episodes)] if pool.inline else parts(range(episodes), size)
    works = [(weights, shard, temperature, filmed, probe) for shard in shards]
    return list(itertools.chain.from_iterable(pool.map("play_evaluation", works, progress)))

"""Flow of off-policy algorithms: collectors fill a replay buffer, a learner samples from it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from rlinf_vla.algorithms.advantages import chunk_rewards
from rlinf_vla.algorithms.off_policy import OffPolicy, OffPolicyConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.devices import device_of
from rlinf_vla.core.protocols import EnvSpec, Policy, VectorEnv
from rlinf_vla.core.transitions import EpisodeRecords
from rlinf_vla.core.types import Episodes, Tensors
from rlinf_vla.data.from_dataset import dataset_transitions, require_same_control_rate
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.episodes import DEMONSTRATION_SEEDS, drawn_episodes, numbered_episodes
from rlinf_vla.rollout.transitions import (
    ChunkRewards,
    faults_of_records,
    record_transitions,
    transition_metrics,
)
from rlinf_vla.runtime.base import BaseFlow, Threads
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.training.lora import acting
from rlinf_vla.training.ranks import rank, summed, world_size
from rlinf_vla.training.replay import AnyReplay, Replay, ShardedReplay, sample_mixed
from rlinf_vla.training.trainer import Trainer

EVERYTHING = 1 << 40
RANKS = "replay_ranks"
"""Key of a checkpoint's state: the number of trainer ranks that divide the replay, if several."""


class TransitionCollector(Protocol):
    """Runs episodes with the policy, or with the scripted expert, in this process or in others."""

    env: EnvSpec
    """Spec of one environment group."""

    def collect(
        self,
        episodes: Episodes,
        rewards: ChunkRewards,
        expert: bool,
        timeline: Timeline,
        progress: Callable[[float], None],
    ) -> list[EpisodeRecords]:
        """Run ``episodes`` to their end; return their records, in their order."""

    def publish(self) -> None:
        """Run later episodes with the current weights."""

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call."""


class LocalCollector:
    """Collector whose policy and environments belong to this process."""

    def __init__(self, policy: Policy, groups: Sequence[VectorEnv], settings: Settings) -> None:
        self.policy = policy
        self.groups = groups
        self.settings = settings
        self.env = groups[0].spec
        self.actor = Actor(policy, settings)

    def collect(
        self,
        episodes: Episodes,
        rewards: ChunkRewards,
        expert: bool,
        timeline: Timeline,
        progress: Callable[[float], None],
    ) -> list[EpisodeRecords]:
        with nullcontext() if expert else acting(self.policy, self.settings.rounded):
            return record_transitions(
                self.policy, self.actor, self.groups, episodes, rewards, expert, timeline, progress
            )

    def publish(self) -> None:
        """Do nothing: the learner trains the policy that acts."""

    def metrics(self) -> dict[str, float]:
        return {}


class Store(Protocol):
    """A replay buffer, in this process or in another one."""

    @property
    def total(self) -> int: ...
    def __len__(self) -> int: ...
    def append(self, episode: Tensors) -> None: ...
    def flush(self) -> None: ...
    def forget(self, total: int) -> None: ...


def open_replays(
    directory: Path, config: OffPolicyConfig, state: dict[str, Any]
) -> tuple[AnyReplay, AnyReplay]:
    """Open the replay buffers of online data and of demonstrations, or this rank's part of them.

    state: from ``StoringFlow.save`` before a resume, else empty. Raises UserError if it is of
    another number of trainer ranks.
    """
    ranks = world_size()
    before = state.get(RANKS, 1)
    if state and ranks != before:
        raise UserError(
            f"the replay buffers of the checkpoint are divided among {before} trainer rank{'s' * (before > 1)}, not {ranks}: "
            f"resume with cluster.trainer_ranks={before}, or start again with resume=never"
        )

    def opened(name: str, capacity: int, total: int) -> AnyReplay:
        if ranks == 1:
            return Replay(directory / name, capacity, total)
        return ShardedReplay(directory / name, rank(), ranks, capacity, total)

    online = opened("online", config.replay_capacity, state.get("replay", 0))
    return online, opened("demonstrations", EVERYTHING, state.get("demonstrations", 0))


def append_all(store: Store, episodes: Iterable[EpisodeRecords]) -> list[bool]:
    """Add ``episodes`` to ``store`` one by one; return which of them succeeded."""
    found = []
    for each in episodes:
        store.append(each.records)
        found.append(each.success)
    return found


def learn_from_replay(
    trainer: Trainer,
    algorithm: OffPolicy,
    replays: tuple[AnyReplay, AnyReplay],
    updates: int,
    run_seed: int,
    iteration: int,
    progress: Callable[[float], None] = lambda fraction: None,
) -> dict[str, float]:
    """Make an iteration's ``updates`` on batches from ``replays``; return the mean metrics.

    All trainer ranks must call it.
    """
    sums, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    config = algorithm.config
    shown = replays[1]
    size = config.batch_size
    share = config.demonstration_share if len(shown) else 0.0
    for index in range(updates):
        # random numbers depend only on the update's index: a resumed run draws the same
        seed = ((run_seed * 1_000_003 + iteration) << 20) + index
        generator = torch.Generator().manual_seed(seed % (1 << 63))
        batch = algorithm.charged(sample_mixed(replays, [1 - share, share], size, generator))
        imitated = partial(sample_mixed, replays, [0.0, 1.0], size, generator)
        for name, value in algorithm.step(
            trainer, batch, generator, iteration, index, imitated
        ).items():
            sums[name] += value
            counts[name] += 1
        progress((index + 1) / updates)
    device = device_of(trainer.policy)
    totals = summed(
        {name: torch.tensor(value, dtype=torch.float64).to(device) for name, value in sums.items()}
    )
    return {name: value / counts[name] for name, value in totals.items()}


class StoringFlow(BaseFlow):
    """Base of off-policy flows: replay of online data and of demonstrations."""

    def __init__(
        self, settings: Settings, config: OffPolicyConfig, replay: Store, shown: Store
    ) -> None:
        super().__init__(settings)
        self.config = config
        self.replay = replay
        self.shown = shown
        self.chunk_rewards = partial(chunk_rewards, gamma=config.gamma, unit=config.gamma_unit)
        self._showing = False
        """Whether demonstrations are being collected; a run resumed then collects them anew."""

    def demonstrate(self, episodes: int) -> None:
        if self.shown.total:
            return
        self._showing = True
        successes = self.show(episodes)
        self._showing = False
        if not successes:
            raise UserError(
                f"algorithm.dataset={self.config.dataset}: none of its episodes has a usable transition"
            )
        self.log({"demonstrations/success": sum(successes) / len(successes)})

    def show(self, episodes: int) -> list[bool]:
        """Add demonstrations to ``shown``; return which of them succeeded."""
        return append_all(self.shown, self._demonstrations(episodes))

    def _demonstrations(self, episodes: int) -> Iterable[EpisodeRecords]:
        raise NotImplementedError

    def update_from_replay(self, updates: int, algorithm: OffPolicy) -> None:
        started = time.perf_counter()
        with self.timeline.span("update", "trainer"):
            self.log(self.learn(updates, algorithm))
        self.log(
            {
                "timing_s/update": time.perf_counter() - started,
                "actor/updates": float(updates),
                "replay/size": float(len(self.replay)),
            }
        )

    def learn(self, updates: int, algorithm: OffPolicy) -> dict[str, float]:
        """Make this iteration's updates; return their mean metrics."""
        raise NotImplementedError

    def save(self) -> dict[str, Any]:
        for store in (self.replay, self.shown):
            store.flush()
        return super().save() | {
            "replay": self.replay.total,
            "demonstrations": 0 if self._showing else self.shown.total,
        }

    def saved(self, states: Sequence[dict[str, Any]]) -> None:
        self.replay.forget(min(state["replay"] for state in states))


class ReplayFlow(StoringFlow):
    """Off-policy flow whose learner and replay buffers are in this process."""

    replay: AnyReplay
    shown: AnyReplay

    def __init__(
        self,
        trainer: Trainer,
        settings: Settings,
        config: OffPolicyConfig,
        directory: Path,
        state: dict[str, Any],
        update_threads: Threads = nullcontext,
    ) -> None:
        """``directory``, ``state``: see ``open_replays``.

        ``update_threads``: context of updates, during which the simulators are idle.
        """
        super().__init__(settings, config, *open_replays(directory, config, state))
        self.trainer = trainer
        self.update_threads = update_threads
        self.policy: Policy = trainer.policy  # type: ignore[assignment]

    def learn(self, updates: int, algorithm: OffPolicy) -> dict[str, float]:
        progress = partial(self.progress, "update")
        with self.update_threads():
            return learn_from_replay(
                self.trainer,
                algorithm,
                (self.replay, self.shown),
                updates,
                self.settings.run_seed,
                self.iteration,
                progress,
            )


class SimulatorFlow(StoringFlow):
    """Off-policy flow with simulators; a mix-in."""

    collector: TransitionCollector

    def _demonstrations(self, episodes: int) -> Iterable[EpisodeRecords]:
        listed = numbered_episodes(DEMONSTRATION_SEEDS, 0, episodes, len(self.collector.env.tasks))
        return self.collector.collect(
            listed, self.chunk_rewards, True, self.timeline, lambda fraction: None
        )

    def training_episodes(self, count: int, draw: int) -> Episodes:
        return drawn_episodes(
            self.settings.run_seed, self.iteration, count, draw, len(self.collector.env.tasks)
        )

    def collect_transitions(self, episodes: Episodes) -> int:
        started = time.perf_counter()
        found = self.collector.collect(
            episodes, self.chunk_rewards, False, self.timeline, self._rolling
        )
        self.changed = True
        for each in found:
            self.replay.append(each.records)
        self.log_faults(faults_of_records(episodes, found, self.collector.env.tasks))
        steps = sum(each.steps for each in found)
        self.log(transition_metrics(found) | {"rollout/steps": float(steps)})
        self.log_rollout(time.perf_counter() - started, steps)
        return steps

    def publish(self) -> None:
        super().publish()
        self.collector.publish()
        self.log(self.collector.metrics())


class OffPolicyFlow(SimulatorFlow, ReplayFlow):
    """Flow of off-policy algorithms in simulators, in one process."""

    def __init__(self, collector: TransitionCollector, *arguments: Any, **options: Any) -> None:
        """``arguments`` and ``options``: see ``ReplayFlow``."""
        super().__init__(*arguments, **options)
        self.collector = collector

    def _demonstrations(self, episodes: int) -> Iterable[EpisodeRecords]:
        if self.config.dataset is None:
            return super()._demonstrations(episodes)
        require_same_control_rate(self.config.dataset, [self.collector.env])
        return dataset_transitions(self.policy, self.config)

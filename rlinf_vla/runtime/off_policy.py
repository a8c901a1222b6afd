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
from rlinf_vla.core.protocols import EnvSpec, Policy, VectorEnv
from rlinf_vla.core.types import EpisodeRecords, Episodes
from rlinf_vla.data.from_dataset import dataset_transitions, require_same_control_rate
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.episodes import DEMONSTRATION_SEEDS, drawn_episodes, numbered_episodes
from rlinf_vla.rollout.transitions import ChunkRewards, record_transitions, transition_metrics
from rlinf_vla.runtime.base import BaseFlow, Threads
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.training.lora import acting
from rlinf_vla.training.replay import Replay, sample_mixed
from rlinf_vla.training.trainer import Trainer

EVERYTHING = 1 << 40


class TransitionCollector(Protocol):
    """Runs episodes with the policy, or with the scripted expert, in this process or in others."""

    env: EnvSpec
    """Spec of one environment group."""

    def collect(
        self, episodes: Episodes, rewards: ChunkRewards, expert: bool, timeline: Timeline, progress: Callable[[float], None]
    ) -> list[EpisodeRecords]:
        """Run ``episodes`` to their end; return their records, in their order."""

    def publish(self) -> None:
        """Run later episodes with the current weights."""

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call."""


class LocalCollector:
    """Collector whose policy and environments belong to this process."""

    def __init__(self, policy: Policy, groups: Sequence[VectorEnv], settings: Settings) -> None:
        self.policy, self.groups, self.settings, self.env = policy, groups, settings, groups[0].spec
        self.actor = Actor(policy, settings)

    def collect(
        self, episodes: Episodes, rewards: ChunkRewards, expert: bool, timeline: Timeline, progress: Callable[[float], None]
    ) -> list[EpisodeRecords]:
        with nullcontext() if expert else acting(self.policy, self.settings.rounded):
            return record_transitions(self.policy, self.actor, self.groups, episodes, rewards, expert, timeline, progress)

    def publish(self) -> None:
        """Do nothing: the learner trains the policy that acts."""

    def metrics(self) -> dict[str, float]:
        return {}


class ReplayFlow(BaseFlow):
    """Base of off-policy flows: learner, replay of online data, replay of demonstrations."""

    def __init__(
        self,
        trainer: Trainer,
        settings: Settings,
        config: OffPolicyConfig,
        directory: Path,
        state: dict[str, Any],
        update_threads: Threads = nullcontext,
    ) -> None:
        """directory: of the replay buffers. state: from ``save`` before a resume, else empty.

        ``update_threads``: context of updates, during which the simulators are idle.
        """
        super().__init__(settings)
        self.trainer, self.config, self.update_threads = trainer, config, update_threads
        self.policy: Policy = trainer.policy  # type: ignore[assignment]
        self.chunk_rewards = partial(chunk_rewards, gamma=config.gamma, unit=config.gamma_unit)
        self.replay = Replay(directory / "online", config.replay_capacity, state.get("replay", 0))
        self.shown = Replay(directory / "demonstrations", EVERYTHING, state.get("demonstrations", 0))
        self._showing = False
        """Whether demonstrations are being collected; a run resumed then collects them anew."""

    def demonstrate(self, episodes: int) -> None:
        if self.shown.total:
            return
        successes = []
        self._showing = True
        for each in self._demonstrations(episodes):
            self.shown.append(each.records)
            successes.append(each.success)
        self._showing = False
        if not successes:
            raise UserError(f"algorithm.dataset={self.config.dataset}: none of its episodes has a usable transition")
        self.log({"demonstrations/success": sum(successes) / len(successes)})

    def _demonstrations(self, episodes: int) -> Iterable[EpisodeRecords]:
        raise NotImplementedError

    def update_from_replay(self, updates: int, algorithm: OffPolicy) -> None:
        started, sums, counts = time.perf_counter(), defaultdict[str, float](float), defaultdict[str, int](int)
        size, share = self.config.batch_size, self.config.demonstration_share if len(self.shown) else 0.0
        with self.timeline.span("update", "trainer"), self.update_threads():
            for index in range(updates):
                # random numbers depend only on the update's index: a resumed run draws the same
                seed = ((self.settings.run_seed * 1_000_003 + self.iteration) << 20) + index
                generator = torch.Generator().manual_seed(seed % (1 << 63))
                batch = sample_mixed([self.replay, self.shown], [1 - share, share], size, generator)
                shown = partial(self.shown.sample, size, generator)
                for name, value in algorithm.step(self.trainer, batch, generator, index, shown).items():
                    sums[name] += value
                    counts[name] += 1
                self.progress("update", (index + 1) / updates)
        self.log({name: value / counts[name] for name, value in sums.items()})
        self.log(
            {"timing_s/update": time.perf_counter() - started, "actor/updates": float(updates), "replay/size": float(len(self.replay))}
        )

    def save(self) -> dict[str, Any]:
        for store in (self.replay, self.shown):
            store.flush()
        return super().save() | {"replay": self.replay.total, "demonstrations": 0 if self._showing else self.shown.total}

    def saved(self, states: Sequence[dict[str, Any]]) -> None:
        self.replay.forget(min(state["replay"] for state in states))


class OffPolicyFlow(ReplayFlow):
    """Flow of off-policy algorithms in simulators."""

    def __init__(self, collector: TransitionCollector, *arguments: Any, **options: Any) -> None:
        """``arguments`` and ``options``: see ``ReplayFlow``."""
        super().__init__(*arguments, **options)
        self.collector = collector

    def _demonstrations(self, episodes: int) -> Iterable[EpisodeRecords]:
        if self.config.dataset is not None:
            require_same_control_rate(self.config.dataset, [self.collector.env])
            return dataset_transitions(self.policy, self.config)
        listed = numbered_episodes(DEMONSTRATION_SEEDS, 0, episodes, len(self.collector.env.tasks))
        return self.collector.collect(listed, self.chunk_rewards, True, self.timeline, lambda fraction: None)

    def training_episodes(self, count: int, draw: int) -> Episodes:
        return drawn_episodes(self.settings.run_seed, self.iteration, count, draw, len(self.collector.env.tasks))

    def collect_transitions(self, episodes: Episodes) -> int:
        started = time.perf_counter()
        found = self.collector.collect(episodes, self.chunk_rewards, False, self.timeline, self._rolling)
        self.changed = True
        for each in found:
            self.replay.append(each.records)
        steps = sum(each.steps for each in found)
        self.log(transition_metrics(found) | {"rollout/steps": float(steps)})
        self.log_rollout(time.perf_counter() - started, steps)
        return steps

    def publish(self) -> None:
        super().publish()
        self.collector.publish()
        self.log(self.collector.metrics())

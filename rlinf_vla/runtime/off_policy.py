"""Flow of SAC in one process: rollouts fill a replay buffer, updates sample from it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlinf_vla.algorithms.advantages import chunk_rewards
from rlinf_vla.algorithms.sac import SACConfig
from rlinf_vla.algorithms.sac_policy import SACPolicy
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import EpisodeRecords, Episodes
from rlinf_vla.data.from_dataset import dataset_transitions, require_same_control_rate
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.episodes import DEMONSTRATION_SEEDS, numbered_episodes
from rlinf_vla.rollout.scripted_actors import ExpertActor
from rlinf_vla.rollout.transitions import collect_transitions, transition_metrics
from rlinf_vla.runtime.local import LocalFlow
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.training.lora import acting
from rlinf_vla.training.replay import Replay, sample_mixed
from rlinf_vla.training.sac_trainer import SACTrainer

EVERYTHING = 1 << 40


class OffPolicyFlow(LocalFlow):
    """Flow of SAC with replay buffers for online data and demonstrations."""

    policy: SACPolicy

    def __init__(
        self,
        policy: SACPolicy,
        groups: Sequence[VectorEnv],
        trainer: SACTrainer,
        settings: Settings,
        timeline: Timeline,
        config: SACConfig,
        directory: Path,
        state: dict[str, Any],
        **options: Any,
    ) -> None:
        """directory: of the replay buffers. state: from ``save`` before a resume, else empty."""
        super().__init__(policy=policy, groups=groups, settings=settings, timeline=timeline, **options)
        self.trainer, self.config = trainer, config
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
        if self.config.dataset is not None:
            require_same_control_rate(self.config.dataset, (env.spec for env in self.groups))
            return dataset_transitions(self.policy, self.config)
        if self.policy.spec.chunk != 1:
            raise UserError(f"expert demonstrations are single actions, not chunks of {self.policy.spec.chunk}: use a policy with chunk 1")
        listed = numbered_episodes(DEMONSTRATION_SEEDS, 0, episodes, len(self.groups[0].spec.tasks))

        def expert(env: VectorEnv) -> ExpertActor:
            return ExpertActor(self.policy, env)

        return collect_transitions(expert, self.policy, self.groups, listed, self.chunk_rewards, self.timeline)

    def collect_transitions(self, episodes: Episodes) -> int:
        started = time.perf_counter()
        with acting(self.policy, self.settings.rounded):
            found = collect_transitions(
                lambda _: self.actor, self.policy, self.groups, episodes, self.chunk_rewards, self.timeline, self._rolling
            )
        self.changed = True
        for each in found:
            self.replay.append(each.records)
        steps = sum(each.steps for each in found)
        self.log(transition_metrics(found) | {"rollout/steps": float(steps)})
        self.log_rollout(time.perf_counter() - started, steps)
        return steps

    def update_from_replay(self, updates: int) -> None:
        started, sums, counts = time.perf_counter(), defaultdict[str, float](float), defaultdict[str, int](int)
        share = self.config.demonstration_share if len(self.shown) else 0.0
        with self.timeline.span("update", "trainer"), self.update_threads():
            for index in range(updates):
                # random numbers depend only on the update's index: a resumed run draws the same
                seed = ((self.settings.run_seed * 1_000_003 + self.iteration) << 20) + index
                generator = torch.Generator().manual_seed(seed % (1 << 63))
                batch = sample_mixed([self.replay, self.shown], [1 - share, share], self.config.batch_size, generator)
                with_actor = index % self.config.actor_every == 0
                shown = self.shown.sample(self.config.batch_size, generator) if self.config.sft_coef and with_actor else None
                for name, value in self.trainer.step(batch, generator, with_actor, shown).items():
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

"""SAC's flow in one process: rollouts fill a replay, updates sample it."""

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
from rlinf_vla.algorithms.soft import SoftPolicy
from rlinf_vla.flow.runtime import LocalFlow
from rlinf_vla.protocols import VectorEnv
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.episodes import DEMONSTRATION_SEEDS, numbered_episodes
from rlinf_vla.rollout.from_dataset import dataset_transitions, refuse_another_pace
from rlinf_vla.rollout.scripted import Expert
from rlinf_vla.rollout.transitions import Recorded, collect_transitions, transition_metrics
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.training.lora import acting
from rlinf_vla.training.replay import Replay, sample_mixed
from rlinf_vla.training.soft_trainer import SoftTrainer
from rlinf_vla.types import Episodes, UserError

EVERYTHING = 1 << 40


class OffPolicyFlow(LocalFlow):
    policy: SoftPolicy

    def __init__(
        self,
        policy: SoftPolicy,
        groups: Sequence[VectorEnv],
        trainer: SoftTrainer,
        settings: Settings,
        timeline: Timeline,
        config: SACConfig,
        directory: Path,
        state: dict[str, Any],
        **options: Any,
    ) -> None:
        """``directory``: of the replay. ``state``: what ``save`` returned at the checkpoint to go on from; empty at the beginning."""
        super().__init__(policy=policy, groups=groups, settings=settings, timeline=timeline, **options)
        self.trainer, self.config = trainer, config
        self.chunk_rewards = partial(chunk_rewards, gamma=config.gamma, unit=config.gamma_unit)
        self.replay = Replay(directory / "online", config.replay_capacity, state.get("replay", 0))
        self.shown = Replay(directory / "demonstrations", EVERYTHING, state.get("demonstrations", 0))
        self._showing = False
        """Demonstrations are being played: a run that is left in them begins them anew."""

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
            raise UserError(f"algorithm.dataset={self.config.dataset}: no episode of it shows what an action leads to")
        self.log({"demonstrations/success": sum(successes) / len(successes)})

    def _demonstrations(self, episodes: int) -> Iterable[Recorded]:
        if self.config.dataset is not None:
            refuse_another_pace(self.config.dataset, (env.spec for env in self.groups))
            return dataset_transitions(self.policy, self.config)
        if self.policy.spec.chunk != 1:
            raise UserError(f"demonstrations of single actions do not fit chunks of {self.policy.spec.chunk}: use a policy with chunk 1")
        listed = numbered_episodes(DEMONSTRATION_SEEDS, 0, episodes, len(self.groups[0].spec.tasks))

        def expert(env: VectorEnv) -> Expert:
            return Expert(self.policy, env)

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

    def improve(self, updates: int) -> None:
        started, sums, counts = time.perf_counter(), defaultdict[str, float](float), defaultdict[str, int](int)
        share = self.config.demonstration_share if len(self.shown) else 0.0
        with self.timeline.span("update", "trainer"), self.update_threads():
            for index in range(updates):
                # an update's random numbers depend on its place alone, so that a resumed run draws the same ones
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

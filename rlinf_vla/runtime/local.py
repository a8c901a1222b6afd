"""Macro flow in one process, with simulators in separate processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

from rlinf_vla.algorithms.on_policy import Batch, OnPolicy
from rlinf_vla.algorithms.parity import Parity
from rlinf_vla.core.protocols import Policy, VectorEnv
from rlinf_vla.core.types import Rollouts, Tensors, Trajectory
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.collector import collect, collect_episodes, rollout_calls
from rlinf_vla.rollout.episodes import drawn_episodes
from rlinf_vla.runtime.base import OnPolicyFlow, Threads
from rlinf_vla.runtime.on_policy_updater import OnPolicyUpdater
from rlinf_vla.training.lora import acting
from rlinf_vla.training.trainer import Trainer


class InProcessFlow(OnPolicyFlow):
    """Flow of on-policy algorithms in one process."""

    def __init__(
        self,
        policy: Policy,
        groups: Sequence[VectorEnv],
        trainer: Trainer,
        settings: Settings,
        staleness: int = 0,
        iterations: int | None = None,
        reuse_frozen: bool = True,
        update_threads: Threads = nullcontext,
    ) -> None:
        """``reuse_frozen``: see ``ClusterConfig``. ``iterations``: see the base class.

        ``update_threads``: context of updates, during which the simulators are idle.
        """
        super().__init__(settings, staleness, iterations)
        self.policy = policy
        self.groups = groups
        self.actor = Actor(policy, settings)
        self.update_threads = update_threads
        self.trainer = trainer
        self._earlier = dict[int, Tensors]()
        self.learning = OnPolicyUpdater(
            trainer, settings.run_seed, settings.temperature, reuse_frozen
        )

    @property
    def parity(self) -> Parity | None:  # type: ignore[override]
        return self.learning.parity

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.groups[0].spec.tasks

    def start_slots(self, iteration: int, version: int, horizon: int) -> Rollouts:
        env = self.groups[0].spec
        calls = rollout_calls(horizon, env.episode_limit, env.steps(self.policy.spec.chunk))
        return self._played(
            version,
            lambda: collect(
                self.actor, self.groups, iteration, version, calls, self.timeline, self._rolling
            ),
        )

    def start_groups(
        self, iteration: int, version: int, groups: int, attempts: int, draw: int
    ) -> Rollouts:
        episodes = drawn_episodes(
            self.settings.run_seed, iteration, groups, draw, len(self.groups[0].spec.tasks)
        ).repeat(attempts)
        return self._played(
            version,
            lambda: collect_episodes(
                self.actor, self.groups, episodes, version, self.timeline, self._rolling
            ),
        )

    def _played(self, version: int, play: Callable[[], Trajectory]) -> Rollouts:
        """Run the rollout at once: the next update changes the weights that it acts with."""
        started = time.perf_counter()
        earlier_weights = (
            nullcontext()
            if version == self.policy_version
            else self.trainer.swapped_weights(self._earlier[version])
        )
        with earlier_weights, acting(self.policy, self.settings.rounded):
            rollouts = play()
        self.log_rollout(time.perf_counter() - started, int(rollouts.valid.sum()))
        return [rollouts]

    def begin(self, iteration: int) -> None:
        super().begin(iteration)
        if self.staleness:
            self._earlier[self.policy_version] = self.trainer.copies()

    def publish(self) -> None:
        super().publish()
        self._earlier = self.earlier_weights()

    def earlier_weights(self) -> dict[int, Tensors]:
        return {
            version: weights
            for version, weights in self._earlier.items()
            if self.is_pending_version(version)
        }

    def restore_earlier_weights(self, earlier_weights: dict[int, Tensors]) -> None:
        self._earlier |= earlier_weights

    def reference(self, rollouts: Rollouts) -> Rollouts:
        with self.timeline.span("reference", "trainer"), self.update_threads():
            return [replace(shard, reference=self.learning.reference(shard)) for shard in rollouts]

    def update(self, batch: Batch, algorithm: OnPolicy, value_only: bool = False) -> bool:
        started = time.perf_counter()
        config = algorithm.config
        if config.sft_coef and not value_only and self.learning.shown is None:
            from rlinf_vla.rollout.demonstrations import collect_demonstrations

            self.learning.shown, expert = collect_demonstrations(
                self.policy, self.groups, config.demonstrations, self.settings.run_seed
            )
            self.log({"sft/expert_success": expert} if expert is not None else {})
        self.changed = True
        with self.timeline.span("update", "trainer"), self.update_threads():
            metrics = self.learning.update(
                batch,
                algorithm,
                value_only,
                self.iteration,
                self.policy_version,
                lambda fraction: self.progress("update", fraction),
            )
        self.log_update(metrics)
        self.log(
            {
                "timing_s/update": self.metrics.get("timing_s/update", 0.0)
                + time.perf_counter()
                - started
            }
        )
        return algorithm.enough(metrics)

"""Run off-policy algorithms on Ray: rollout workers fill the replay buffer of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import EpisodeRecords, Episodes
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.evaluation_episodes import EpisodeResult
from rlinf_vla.rollout.transitions import ChunkRewards
from rlinf_vla.runtime import builders, run_directory
from rlinf_vla.runtime.base import Runtime, Say
from rlinf_vla.runtime.off_policy import OffPolicyFlow
from rlinf_vla.runtime.ray.pool import Pool, parts
from rlinf_vla.runtime.ray.rollout_workers import Weights, evaluate_on
from rlinf_vla.runtime.ray.serialization import Packed
from rlinf_vla.runtime.ray.worker import clock_offset, shifted
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.training.checkpoint import save_checkpoint
from rlinf_vla.training.lora import rounded_weights
from rlinf_vla.training.trainer import Trainer


class RayCollector:
    """A ``TransitionCollector`` that runs episodes on the rollout workers of a cluster."""

    def __init__(self, pool: Pool, policy: Policy, trainer: Trainer, settings: Settings, share: int) -> None:
        """``share``: episodes per call of a worker."""
        self.pool, self.policy, self.trainer, self.settings = pool, policy, trainer, settings
        self.env = pool.call("worker_info")[0].env
        self.share = share
        self._version = 0
        self.publish()

    def publish(self) -> None:
        import ray

        acting = self.trainer.acting_weights()
        if self.settings.rounded:
            acting = rounded_weights(self.policy, acting)
        self._version += 1
        packed = ray.put(Packed.of(acting))
        self.weights: tuple[Weights, Any] = (Weights(self._version, packed), packed)
        """The published weights: version, and reference to the tensors."""

    def collect(
        self, episodes: Episodes, rewards: ChunkRewards, expert: bool, timeline: Timeline, progress: Callable[[float], None]
    ) -> list[EpisodeRecords]:
        works = [(*self.weights, part, rewards, expert) for part in parts(episodes, self.share)]
        found = []
        for played, spans in self.pool.map("collect_transitions", works, progress):
            found += [EpisodeRecords(packed.tensors(), success, steps) for packed, success, steps in played]
            for span in shifted(spans, -clock_offset()):
                timeline.add(*span)
        return found

    def evaluate(self, episodes: int, temperature: float, filmed: int, progress: Callable[[float], None]) -> list[EpisodeResult]:
        """Run the first ``episodes`` evaluation episodes; record frames of the first ``filmed``."""
        return evaluate_on(self.pool, self.weights, self.share, episodes, temperature, filmed, progress)

    def metrics(self) -> dict[str, float]:
        lost, recovery_s = self.pool.news()
        return {"faults/rollout": float(lost), "faults/recovery_s": recovery_s}


@contextmanager
def open_off_policy(recipe: Recipe, pool: Pool, directory: Path, checkpoint: Path | None, say: Say) -> Iterator[Runtime]:
    """Build the learner in this process and restore ``checkpoint``. Raises UserError."""
    policy, trainer, state = builders.build_learner(recipe, checkpoint, say)
    assert isinstance(policy, Policy)
    settings = builders.actor_settings(recipe, recipe.rollout.temperature)
    collector = RayCollector(pool, policy, trainer, settings, recipe.env.num_envs // recipe.cluster.shards)
    policy.fit_instructions(collector.env.instructions)
    threads = partial(builders.threads, recipe.cluster.update_threads)
    flow = OffPolicyFlow(collector, trainer, settings, recipe.algorithm, directory / run_directory.REPLAY, state, threads)

    def save(state: dict[str, Any]) -> None:
        save_checkpoint(directory / run_directory.CHECKPOINTS, policy, trainer, state, recipe.checkpoints.keep)

    yield Runtime(
        flow, collector.env, collector.env.control_hz / policy.spec.chunk, partial(collector.evaluate, recipe.episodes), save, state
    )

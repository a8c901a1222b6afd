"""Supervised training on Ray: trainer ranks learn, rollout workers run the expert and evaluate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.algorithms.classifier import Frames
from rlinf_vla.algorithms.sft import Demonstrations
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.rollout.evaluation_episodes import EpisodeResult
from rlinf_vla.runtime import builders, run_directory
from rlinf_vla.runtime.base import Runtime, Say
from rlinf_vla.runtime.ray.flow import Workers
from rlinf_vla.runtime.ray.publisher import Publisher
from rlinf_vla.runtime.ray.rollout_workers import Weights, evaluate_on
from rlinf_vla.runtime.supervised import SupervisedFlow


class RaySupervisedFlow(SupervisedFlow):
    """Every rank gets the whole batch of a step, and computes its rows (``training/ranks.py``)."""

    def __init__(self, workers: Workers, *arguments: Any) -> None:
        """``arguments``: see ``SupervisedFlow``."""
        super().__init__(*arguments)
        self.rollouts = workers.rollouts
        self.trainers = workers.trainers
        self._publisher = Publisher(workers.rollouts, workers.trainers)
        self._sent: Weights | None = None

    def collect_demonstrations(
        self, config: DemonstrationConfig
    ) -> tuple[Demonstrations, float | None]:
        ((found, success),) = self.rollouts.call("demonstrate", config)
        return found, success

    def collect_frames(self, config: DemonstrationConfig) -> Frames:
        frames: Frames = self.rollouts.call("label", config)[0]
        return frames

    def will_leave(self) -> bool:
        return self.trainers.will_leave()

    def step(self, batch: Demonstrations | Frames, rate: float) -> dict[str, float]:
        import ray

        metrics: dict[str, float] = self.trainers.call("step", ray.put(batch), rate)[0][0]
        return metrics

    def success_logits(self, frames: Frames) -> Tensor:
        import ray

        logits: Tensor = self.trainers.call("success_logits", ray.put(frames))[0][0]
        return logits

    def evaluate(
        self,
        episodes: int,
        size: int,
        temperature: float,
        filmed: int,
        progress: Callable[[float], None],
        probe: str | None,
    ) -> list[EpisodeResult]:
        """Evaluate the current policy on the first ``episodes``, ``size`` in a call of a worker."""
        if self._sent is None or self._sent.version != self.policy_version:
            self._sent, _ = self._publisher.publish(self.policy_version)
        return evaluate_on(
            self.rollouts, self._sent, size, episodes, temperature, filmed, progress, probe
        )


@contextmanager
def open_supervised(
    recipe: Recipe, workers: Workers, directory: Path, checkpoint: Path | None, say: Say
) -> Iterator[Runtime]:
    """Restore ``checkpoint`` and yield the runtime of supervised training. Raises UserError."""
    introduced = workers.rollouts.call("worker_info")[0]
    flow = RaySupervisedFlow(
        workers, builders.actor_settings(recipe, recipe.rollout.temperature), say
    )
    state = flow.trainers.restore(checkpoint)

    def save(state: dict[str, Any]) -> None:
        flow.trainers.save(directory / run_directory.CHECKPOINTS, state, recipe.checkpoints.keep)

    env = introduced.env
    if recipe.algorithm.trains_reward or env is None:
        yield Runtime(flow, None, 0.0, None, save, state)
    else:
        play = partial(flow.evaluate, recipe.episodes, recipe.env.num_envs // recipe.cluster.shards)
        yield Runtime(
            flow, env, env.control_hz / env.steps(introduced.policy.chunk), play, save, state
        )

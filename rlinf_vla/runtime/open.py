"""Open a recipe's runtime: its training flow, evaluation and checkpoints, where the recipe says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rlinf_vla.config.recipe import OFF_POLICY, ON_POLICY, Recipe
from rlinf_vla.core.protocols import Policy, VectorEnv
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.rollout.evaluation_episodes import EpisodeResult, play_evaluation
from rlinf_vla.runtime import builders, run_directory
from rlinf_vla.runtime.base import BaseFlow, PlayEpisodes, Runtime, Say
from rlinf_vla.runtime.on_policy import OnPolicyFlow
from rlinf_vla.runtime.workers.base import WorkerInfo, Workers
from rlinf_vla.runtime.workers.local import workers_here
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.training.checkpoint import load_earlier
from rlinf_vla.training.lora import acting


@contextmanager
def open_runtime(
    recipe: Recipe, directory: Path, checkpoint: Path | None, say: Say
) -> Iterator[Runtime]:
    """Open a simulator recipe's runtime and restore ``checkpoint``. Raises UserError early."""
    with ExitStack() as stack:
        workers = stack.enter_context(_started(recipe, directory, say))
        trainer: WorkerInfo = workers.trainers.worker_info
        say(builders.size_of(recipe, trainer.weights, trainer.trained))
        state = workers.trainers.restore(checkpoint)
        settings = builders.actor_settings(recipe, recipe.rollout.temperature)
        share = recipe.env.num_envs // recipe.cluster.shards
        worker: WorkerInfo = workers.rollouts.call("worker_info")[0]
        flow: BaseFlow
        play: Callable[..., list[EpisodeResult]]
        if recipe.algorithm.family == ON_POLICY:
            on_policy = OnPolicyFlow(
                workers,
                recipe.env.num_envs,
                settings,
                staleness=recipe.algorithm.staleness,
                iterations=recipe.iterations,
            )
            stack.enter_context(closing(on_policy))
            if checkpoint is not None:
                on_policy.restore_earlier_weights(load_earlier(checkpoint))
                on_policy.split.restore(state)
            flow = on_policy
            play = partial(on_policy.evaluate, recipe.episodes)
        elif recipe.algorithm.family == OFF_POLICY:
            from rlinf_vla.runtime.off_policy import OffPolicyFlow

            replay = directory / run_directory.REPLAY
            flow = OffPolicyFlow(workers, share, settings, recipe.algorithm, replay, state)
            play = partial(flow.evaluate, recipe.episodes)
        else:
            from rlinf_vla.runtime.supervised import SupervisedFlow

            flow = SupervisedFlow(workers, settings, say)
            play = partial(flow.evaluate, recipe.episodes, share)

        def save(state: dict[str, Any]) -> None:
            checkpoints = directory / run_directory.CHECKPOINTS
            earlier = flow.packed_earlier()
            workers.trainers.save(checkpoints, state, recipe.checkpoints.keep, earlier)

        env = worker.env if recipe.algorithm.acts else None
        if env is None or worker.policy is None:
            yield Runtime(flow, None, 0.0, None, save, state)
        else:
            calls_per_s = env.control_hz / env.steps(worker.policy.chunk)
            yield Runtime(flow, env, calls_per_s, play, save, state)


def _started(recipe: Recipe, directory: Path, say: Say) -> AbstractContextManager[Workers]:
    """Start the recipe's workers, in this process or on a cluster."""
    if recipe.cluster.runtime == "ray":
        from rlinf_vla.runtime.ray.open import workers_on_ray

        return workers_on_ray(recipe, directory, say)
    return workers_here(recipe, say)


def play_in_process(recipe: Recipe, policy: Policy, groups: Sequence[VectorEnv]) -> PlayEpisodes:
    """Return a ``PlayEpisodes`` that runs the policy in this process."""

    def play(
        temperature: float, filmed: int, progress: Callable[[float], None], probe: str | None
    ) -> list[EpisodeResult]:
        actor = Actor(policy, builders.actor_settings(recipe, temperature))
        with acting(policy, actor.settings.rounded):
            return play_evaluation(
                actor, groups, range(recipe.episodes), Timeline(), filmed, progress, probe
            )

    return play

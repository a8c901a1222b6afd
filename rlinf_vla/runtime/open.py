"""Open a recipe's runtime: its training flow, evaluation and checkpoints, where the recipe says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rlinf_vla.config.recipe import OFF_POLICY, SUPERVISED, Recipe
from rlinf_vla.core.protocols import Policy, VectorEnv
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.rollout.evaluation_episodes import EpisodeResult, play_evaluation
from rlinf_vla.runtime import builders, run_directory, wrapped_envs
from rlinf_vla.runtime.base import BaseFlow, PlayEpisodes, Runtime, Say
from rlinf_vla.runtime.fit import remarks
from rlinf_vla.runtime.local import InProcessFlow
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.training.checkpoint import load_earlier, save_checkpoint
from rlinf_vla.training.lora import acting


def open_runtime(
    recipe: Recipe, directory: Path, checkpoint: Path | None, say: Say
) -> AbstractContextManager[Runtime]:
    """Open a simulator recipe's runtime and restore ``checkpoint``. Raises UserError early."""
    if recipe.cluster.runtime == "ray":
        from rlinf_vla.runtime.ray.open import open_on_ray

        return open_on_ray(recipe, directory, checkpoint, say)
    return _in_process(recipe, directory, checkpoint, say)


@contextmanager
def _in_process(
    recipe: Recipe, directory: Path, checkpoint: Path | None, say: Say
) -> Iterator[Runtime]:
    config = recipe.algorithm
    family = recipe.algorithm.family
    settings = builders.actor_settings(recipe, recipe.rollout.temperature)
    threads = partial(builders.threads, recipe.cluster.update_threads)
    with ExitStack() as stack:
        groups: Sequence[VectorEnv] = ()
        outline: Policy | None = None
        if builders.needs_environments(recipe):
            say(f"starting {recipe.env.num_envs} environments ({recipe.env.name})")
            outline = None if config.trains_reward else builders.outline(recipe)
            groups = stack.enter_context(
                builders.open_envs(recipe, outline, recipe.rollout.pipeline_depth)
            )
            for line in remarks(outline.spec, groups[0].spec) if outline is not None else []:
                say(line)
        network, trainer, state = builders.build_learner(recipe, checkpoint, say)
        policy = network if isinstance(network, Policy) else None
        said = () if outline is None else outline.spec.remarks
        for line in policy.spec.remarks if policy is not None else ():
            if line not in said:  # on the weights, which the outline does not have
                say(line)
        if policy is not None and groups:
            policy.fit_instructions(groups[0].spec.instructions)
        stack.enter_context(builders.threads(recipe.cluster.rollout_threads))
        flow: BaseFlow
        if policy is None or family == SUPERVISED:
            from rlinf_vla.runtime.supervised import LocalSupervisedFlow

            flow = LocalSupervisedFlow(network, groups, trainer, settings, threads, say)
        elif family == OFF_POLICY:
            from rlinf_vla.runtime.off_policy import LocalCollector, OffPolicyFlow

            training = wrapped_envs.rewarded(recipe, groups, policy.spec.chunk)
            collector = LocalCollector(policy, training, settings)
            replay = directory / run_directory.REPLAY
            flow = OffPolicyFlow(collector, trainer, settings, config, replay, state, threads)
        else:
            flow = InProcessFlow(
                policy,
                wrapped_envs.rewarded(recipe, groups, policy.spec.chunk),
                trainer,
                settings,
                reuse_frozen=recipe.cluster.reuse_frozen,
                update_threads=threads,
                staleness=config.staleness,
                iterations=recipe.iterations,
            )
            flow.restore_earlier_weights(load_earlier(checkpoint) if checkpoint is not None else {})

        def save(state: dict[str, Any]) -> None:
            checkpoints = directory / run_directory.CHECKPOINTS
            save_checkpoint(
                checkpoints,
                network,
                trainer,
                state,
                recipe.checkpoints.keep,
                flow.earlier_weights(),
            )

        if policy is None or not groups:
            yield Runtime(flow, None, 0.0, None, save, state)
        else:
            timed = wrapped_envs.timed(recipe, groups, policy.spec.chunk)
            spec = timed[0].spec
            rate = spec.control_hz / spec.steps(policy.spec.chunk)
            yield Runtime(flow, spec, rate, play_in_process(recipe, policy, timed), save, state)


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

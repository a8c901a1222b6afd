"""Open a recipe's runtime: its training flow, evaluation and checkpoints, where the recipe says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.protocols import Policy, VectorEnv
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.rollout.evaluation_episodes import EpisodeResult, play_evaluation
from rlinf_vla.runtime import builders, run_directory
from rlinf_vla.runtime.base import BaseFlow, PlayEpisodes, Runtime, Say
from rlinf_vla.runtime.local import InProcessFlow
from rlinf_vla.runtime.off_policy import OffPolicyFlow
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.training.checkpoint import load_checkpoint, load_earlier, save_checkpoint
from rlinf_vla.training.lora import acting
from rlinf_vla.training.sac_trainer import SACTrainer


def open_runtime(recipe: Recipe, directory: Path, checkpoint: Path | None, say: Say) -> AbstractContextManager[Runtime]:
    """Open a simulator recipe's runtime and restore ``checkpoint``. Raises UserError early."""
    if recipe.cluster.runtime == "ray":
        from rlinf_vla.runtime.ray.open import open_on_ray

        return open_on_ray(recipe, directory, checkpoint, say)
    return _in_process(recipe, directory, checkpoint, say)


@contextmanager
def _in_process(recipe: Recipe, directory: Path, checkpoint: Path | None, say: Say) -> Iterator[Runtime]:
    policy = builders.build_policy(recipe)
    if recipe.checkpoint is not None:
        load_checkpoint(Path(recipe.checkpoint).expanduser(), policy)
    trainer = builders.build_trainer(recipe, policy)
    state = load_checkpoint(checkpoint, policy, trainer) if checkpoint is not None else {}
    trainable = sum(parameter.numel() for parameter in trainer.parameters.values())
    say(f"policy {recipe.model.name}: {sum(p.numel() for p in policy.parameters()):,} weights, {trainable:,} of them trained")
    say(f"starting {recipe.env.num_envs} environments ({recipe.env.name})")
    settings = builders.actor_settings(recipe, recipe.rollout.temperature)
    threads = partial(builders.threads, recipe.cluster.update_threads)
    with builders.open_envs(recipe, policy, recipe.rollout.pipeline_depth) as groups, builders.threads(recipe.cluster.rollout_threads):
        rewarded = builders.rewarded(recipe, groups)
        flow: BaseFlow
        if isinstance(trainer, SACTrainer):
            replay = directory / run_directory.REPLAY
            flow = OffPolicyFlow(
                trainer.policy, rewarded, trainer, settings, Timeline(), recipe.algorithm, replay, state, update_threads=threads
            )
        else:
            flow = InProcessFlow(
                policy,
                rewarded,
                trainer,
                settings,
                Timeline(),
                reuse_frozen=recipe.cluster.reuse_frozen,
                update_threads=threads,
                staleness=recipe.algorithm.staleness,
                iterations=recipe.iterations,
            )
            flow.restore_earlier_weights(load_earlier(checkpoint) if checkpoint is not None else {})

        def save(state: dict[str, Any]) -> None:
            earlier_weights = flow.earlier_weights() if isinstance(flow, InProcessFlow) else None
            save_checkpoint(directory / run_directory.CHECKPOINTS, policy, trainer, state, recipe.checkpoints.keep, earlier_weights)

        spec = groups[0].spec
        yield Runtime(flow, spec, spec.control_hz / policy.spec.chunk, play_in_process(recipe, policy, groups), save, state)


def play_in_process(recipe: Recipe, policy: Policy, groups: Sequence[VectorEnv]) -> PlayEpisodes:
    """Return a ``PlayEpisodes`` that runs the policy in this process."""

    def play(temperature: float, filmed: int, progress: Callable[[float], None]) -> list[EpisodeResult]:
        actor = Actor(policy, builders.actor_settings(recipe, temperature))
        with acting(policy, actor.settings.rounded):
            return play_evaluation(actor, groups, range(recipe.episodes), Timeline(), filmed, progress)

    return play

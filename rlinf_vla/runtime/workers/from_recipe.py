"""What builds the workers of a recipe, and the workers of a run in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial

from rlinf_vla.config.recipe import OFF_POLICY, ON_POLICY, SUPERVISED, Recipe, RewardConfig
from rlinf_vla.core.protocols import Learner, Policy, VectorEnv
from rlinf_vla.runtime import builders, wrapped_envs
from rlinf_vla.runtime.fit import remarks
from rlinf_vla.runtime.workers.base import Builders, Workers
from rlinf_vla.runtime.workers.local import LocalPool, LocalTrainers, SharingRolloutWorker
from rlinf_vla.runtime.workers.trainer import TrainerWorker


def reward_workers(recipe: Recipe) -> int:
    """Return the number of reward workers; 0 if the recipe uses the environments' own reward."""
    on_policy = recipe.algorithm.family == ON_POLICY  # otherwise the rollout workers compute it
    return recipe.cluster.reward_workers if on_policy and recipe.reward != RewardConfig() else 0


def recipe_builders(recipe: Recipe, shards: int = 1, rewards_apart: bool = False) -> Builders:
    """Return the builder functions for workers of which each has one of ``shards`` equal parts of
    the environments."""
    return Builders(
        learner=partial(builders.build_initial, recipe),
        head=partial(builders.build_head, recipe),
        environments=partial(_environments, recipe, shards),
        trainer=partial(builders.build_trainer, recipe),
        algorithm=partial(builders.build_algorithm, recipe),
        reward_shaper=partial(wrapped_envs.build_reward_shaper, recipe),
        rewards_apart=rewards_apart,
        settings=builders.actor_settings(recipe, recipe.rollout.temperature),
        cluster=recipe.cluster,
    )


def trainer_class(recipe: Recipe) -> type[TrainerWorker]:
    """Return the class of the recipe's trainer ranks."""
    if recipe.algorithm.family != OFF_POLICY:
        return TrainerWorker
    from rlinf_vla.runtime.workers.learner import LearnerWorker

    return LearnerWorker


@contextmanager
def _environments(
    recipe: Recipe, shards: int
) -> Iterator[tuple[Sequence[VectorEnv], Sequence[VectorEnv]]]:
    if not builders.needs_environments(recipe):
        yield (), ()
        return
    share = replace(recipe, env=replace(recipe.env, num_envs=recipe.env.num_envs // shards))
    outline = None if recipe.algorithm.trains_reward else builders.outline(recipe)
    with builders.open_envs(share, outline, recipe.rollout.pipeline_depth) as groups:
        if outline is None:
            yield groups, groups
            return
        # supervised training reads no reward, and one that it trains cannot be built yet
        chunk = outline.spec.chunk
        timed = wrapped_envs.timed(share, groups, chunk)
        supervised = recipe.algorithm.family == SUPERVISED
        yield timed, timed if supervised else wrapped_envs.rewarded(share, groups, chunk)


@contextmanager
def workers_here(recipe: Recipe, say: Callable[[str], None]) -> Iterator[Workers]:
    """Start the recipe's workers in this process. Raises UserError."""
    parts = recipe_builders(recipe)
    trainer = trainer_class(recipe)(parts, 0)

    def learner() -> Learner:
        """Build the network only after the simulators have started."""
        trainer.ready()
        return trainer.policy

    rollouts = SharingRolloutWorker(replace(parts, learner=learner), trainer)
    if builders.needs_environments(recipe):
        say(f"starting {recipe.env.num_envs} environments ({recipe.env.name})")
    with closing(rollouts), builders.threads(recipe.cluster.rollout_threads):
        rollouts.ready()
        for line in _remarks(recipe, rollouts, trainer.policy):
            say(line)
        pool = LocalPool(rollouts, recipe.cluster)
        yield Workers(pool, None, None, None, LocalTrainers(trainer))


def _remarks(recipe: Recipe, rollouts: SharingRolloutWorker, learner: Learner) -> list[str]:
    """Return what a user should know of how policy and environment fit, each line once."""
    if not isinstance(learner, Policy):
        return []
    lines = list(remarks(learner.spec, rollouts.groups[0].spec)) if rollouts.groups else []
    return list(dict.fromkeys([*lines, *learner.spec.remarks]))

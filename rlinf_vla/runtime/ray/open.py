"""Start the workers of a recipe's training flow on a Ray cluster, and stop them at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlinf_vla.config.cluster import FAKE_GPU, ClusterConfig
from rlinf_vla.config.recipe import OFF_POLICY, ON_POLICY, SUPERVISED, Recipe, RewardConfig
from rlinf_vla.core import plugins
from rlinf_vla.core.io import write_json
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.rollout.split import require_separable
from rlinf_vla.runtime import builders, run_directory, wrapped_envs
from rlinf_vla.runtime.base import Runtime, Say
from rlinf_vla.runtime.machines import Cluster, describe
from rlinf_vla.runtime.ray.cluster import connect_cluster
from rlinf_vla.runtime.ray.flow import RayFlow, Workers
from rlinf_vla.runtime.ray.growth import Growth
from rlinf_vla.runtime.ray.off_policy import LearnerWorker, open_off_policy
from rlinf_vla.runtime.ray.places import (
    Role,
    ask_where,
    machines_for,
    require_room,
    reserve_places,
    roles_of,
)
from rlinf_vla.runtime.ray.pool import Pool
from rlinf_vla.runtime.ray.rollout_workers import FeatureWorker, RolloutWorker
from rlinf_vla.runtime.ray.scoring_workers import ReferenceWorker, RewardWorker
from rlinf_vla.runtime.ray.supervised import open_supervised
from rlinf_vla.runtime.ray.trainer_workers import Trainers, TrainerWorker
from rlinf_vla.runtime.ray.worker import HEALTH, WEIGHTS, Builders
from rlinf_vla.training.checkpoint import load_earlier

PLACEMENT = "placement.json"
"""File of a run with the machine, process and GPUs of each worker."""


@contextmanager
def open_on_ray(
    recipe: Recipe, directory: Path, checkpoint: Path | None, say: Say
) -> Iterator[Runtime]:
    """Start the recipe's workers and restore ``checkpoint``. Raises UserError."""
    cluster = recipe.cluster
    split = recipe.rollout.split == "head"
    family = recipe.algorithm.family
    on_policy = family == ON_POLICY
    if split:
        require_separable(plugins.choose("model", recipe.model.name, plugins.models()))
    counts = {
        "trainer": cluster.trainer_ranks,
        "rollout": cluster.rollout_workers,
        "reference": cluster.reference_workers if on_policy and recipe.algorithm.kl_coef else 0,
        "reward": _reward_workers(recipe),
        "feature": cluster.feature_workers if split else 0,
    }
    parts = dict.fromkeys(counts, _builders(recipe))
    workers = cluster.rollout_workers
    fake_gpus = None
    if cluster.device == FAKE_GPU and cluster.address is None:
        fake_gpus = describe(cluster).gpus
    with connect_cluster(cluster.address, roles_of(cluster, counts), say, fake_gpus):
        machines = machines_for(cluster)
        learner = LearnerWorker if family == OFF_POLICY else TrainerWorker
        roles = roles_of(cluster, counts, machines)
        if builders.needs_environments(recipe):
            say(
                f"starting {recipe.env.num_envs} environments ({recipe.env.name}) on {workers} rollout worker{'s' if workers > 1 else ''}"
            )
        with launch_workers(parts, roles, cluster, say, machines, learner) as launched:
            write_json(
                directory / PLACEMENT,
                {"workers": ask_where(launched.actors(), cluster.start_timeout_s)},
            )
            trainer = launched.trainers.worker_info
            say(builders.size_of(recipe, trainer.weights, trainer.trained))
            for line in () if trainer.policy is None else trainer.policy.remarks:
                say(line)
            if on_policy:
                opened = _open_on_policy(recipe, launched, directory, checkpoint)
            elif family == OFF_POLICY:
                opened = open_off_policy(recipe, launched, directory, checkpoint)
            else:
                opened = open_supervised(recipe, launched, directory, checkpoint, say)
            with opened as runtime:
                yield runtime


@contextmanager
def _open_on_policy(
    recipe: Recipe, workers: Workers, directory: Path, checkpoint: Path | None
) -> Iterator[Runtime]:
    ahead = {"staleness": recipe.algorithm.staleness, "iterations": recipe.iterations}
    with closing(
        RayFlow(
            workers,
            recipe.env.num_envs,
            builders.actor_settings(recipe, recipe.rollout.temperature),
            **ahead,
        )
    ) as flow:
        state = flow.trainers.restore(checkpoint)
        if checkpoint is not None:
            flow.restore_earlier_weights(load_earlier(checkpoint))

        def save(state: dict[str, Any]) -> None:
            flow.write_checkpoint(
                directory / run_directory.CHECKPOINTS, state, recipe.checkpoints.keep
            )

        yield Runtime(
            flow,
            flow.env,
            flow.env.control_hz / flow.steps,
            partial(flow.evaluate, recipe.episodes),
            save,
            state,
        )


def _reward_workers(recipe: Recipe) -> int:
    """Return the number of reward workers; 0 if the recipe uses the environments' own reward."""
    on_policy = recipe.algorithm.family == ON_POLICY  # otherwise the rollout workers compute it
    return recipe.cluster.reward_workers if on_policy and recipe.reward != RewardConfig() else 0


def _builders(recipe: Recipe) -> Builders:
    """Return the builder functions for the recipe's workers."""
    return Builders(
        learner=partial(builders.build_initial, recipe),
        head=partial(builders.build_head, recipe),
        environments=partial(_environments, recipe),
        trainer=partial(builders.build_trainer, recipe),
        algorithm=partial(builders.build_algorithm, recipe),
        reward_shaper=partial(wrapped_envs.build_reward_shaper, recipe),
        rewards_apart=_reward_workers(recipe) > 0,
        settings=builders.actor_settings(recipe, recipe.rollout.temperature),
        cluster=recipe.cluster,
    )


@contextmanager
def _environments(recipe: Recipe) -> Iterator[tuple[Sequence[VectorEnv], Sequence[VectorEnv]]]:
    if not builders.needs_environments(recipe):
        yield (), ()
        return
    share = replace(
        recipe, env=replace(recipe.env, num_envs=recipe.env.num_envs // recipe.cluster.shards)
    )
    outline = None if recipe.algorithm.trains_reward else builders.outline(recipe)
    with builders.open_envs(share, outline, recipe.rollout.pipeline_depth) as groups:
        if outline is None:
            yield groups, groups
            return
        # supervised training reads no reward, and one that it trains cannot be built yet
        chunk = outline.spec.chunk
        timed = wrapped_envs.timed(share, groups, chunk)
        yield (
            timed,
            timed
            if recipe.algorithm.family == SUPERVISED
            else wrapped_envs.rewarded(share, groups, chunk),
        )


@contextmanager
def launch_workers(
    builders: Mapping[str, Builders],
    roles: Mapping[str, Role],
    cluster: ClusterConfig,
    say: Say,
    machines: Cluster | None = None,
    learner: type[TrainerWorker] = TrainerWorker,
) -> Iterator[Workers]:
    """Start workers in the connected cluster and stop them at the end. ``builders``: by role.

    ``machines``: those of the roles' slots. ``learner``: of the trainer's workers. Raises UserError
    if the cluster has no room.
    """
    import ray

    require_room(ray.nodes(), roles, machines)
    remote: Any = ray.remote
    with ExitStack() as stack:
        places = stack.enter_context(
            reserve_places(roles, cluster.start_timeout_s, cluster.spread, machines)
        )

        groups = {HEALTH: 1, WEIGHTS: 1}
        # Ray itself restarts these, so that the handles of rollout workers stay valid
        kind = remote(max_restarts=-1, max_task_retries=-1, concurrency_groups=groups)(
            FeatureWorker
        )
        features = [
            kind.options(**place).remote(builders["feature"], number)
            for number, place in enumerate(places["feature"])
        ]
        for actor in features:
            stack.callback(ray.kill, actor)

        def spawn(
            kind: type, role: str, place: int, options: Mapping[str, Any] | None = None
        ) -> Any:
            actor = remote(
                max_restarts=0, concurrency_groups=groups, **options or places[role][place]
            )(kind)
            backbone = (
                [features[place % len(features)]] if features and kind is RolloutWorker else []
            )
            return actor.remote(builders[role], place, *backbone)

        def pool(kind: type, role: str) -> Pool:
            found = Pool(role, partial(spawn, kind, role), roles[role].count, cluster, say)
            stack.callback(found.close)
            return found

        rollouts = pool(RolloutWorker, "rollout")
        rewards, references = (
            pool(kind, role) if roles[role].count else None
            for kind, role in ((RewardWorker, "reward"), (ReferenceWorker, "reference"))
        )
        trainers = Trainers(
            [spawn(learner, "trainer", rank) for rank in range(roles["trainer"].count)], cluster
        )
        stack.callback(trainers.close)
        growth = None
        most = cluster.most_rollout_workers or 0
        if most > roles["rollout"].count:
            growth = Growth(
                rollouts, roles["rollout"], most, partial(spawn, RolloutWorker, "rollout")
            )
            stack.callback(growth.close)
        yield Workers(rollouts, rewards, references, features, trainers, growth)

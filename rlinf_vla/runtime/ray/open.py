"""Start the workers of a recipe's training flow on a Ray cluster, and stop them at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlinf_vla.config.cluster import FAKE_GPU, ClusterConfig
from rlinf_vla.config.recipe import ON_POLICY, Recipe
from rlinf_vla.core import plugins
from rlinf_vla.core.io import write_json
from rlinf_vla.rollout.split import require_separable
from rlinf_vla.runtime import builders
from rlinf_vla.runtime.base import Say
from rlinf_vla.runtime.builders import recipe_builders, reward_workers, trainer_class
from rlinf_vla.runtime.machines import Cluster, compare_with_assumed, describe
from rlinf_vla.runtime.ray.cluster import connect_cluster
from rlinf_vla.runtime.ray.downloads import download_on_machines
from rlinf_vla.runtime.ray.growth import Growth
from rlinf_vla.runtime.ray.places import (
    Role,
    ask_where,
    machines_for,
    neighbours,
    require_room,
    reserve_places,
    roles_of,
)
from rlinf_vla.runtime.ray.pool import HEALTH, WEIGHTS, Pool
from rlinf_vla.runtime.ray.trainers import Trainers
from rlinf_vla.runtime.recipes import hub_locations
from rlinf_vla.runtime.workers.base import Builders, Workers
from rlinf_vla.runtime.workers.rollout import FeatureWorker, RolloutWorker
from rlinf_vla.runtime.workers.scoring import ReferenceWorker, RewardWorker
from rlinf_vla.runtime.workers.trainer import TrainerWorker

PLACEMENT = "placement.json"
"""File of a run with the machine, process and GPUs of each worker."""


@contextmanager
def workers_on_ray(recipe: Recipe, directory: Path, say: Say) -> Iterator[Workers]:
    """Start the recipe's workers on a cluster. Raises UserError."""
    cluster = recipe.cluster
    for line in compare_with_assumed(cluster):
        say(line)
    split = recipe.rollout.split == "head"
    on_policy = recipe.algorithm.family == ON_POLICY
    if split:
        require_separable(plugins.choose("model", recipe.model.name, plugins.models()))
    rewards = reward_workers(recipe)
    counts = {
        "trainer": cluster.trainer_ranks,
        "rollout": cluster.rollout_workers,
        "reference": cluster.reference_workers if on_policy and recipe.algorithm.kl_coef else 0,
        "reward": rewards,
        "feature": cluster.feature_workers if split else 0,
    }
    parts = dict.fromkeys(counts, recipe_builders(recipe, cluster.shards, rewards > 0))
    workers = cluster.rollout_workers
    fake_gpus = None
    if cluster.device == FAKE_GPU and cluster.address is None:
        fake_gpus = describe(cluster).gpus
    with connect_cluster(cluster.address, roles_of(cluster, counts), say, fake_gpus):
        machines = machines_for(cluster)
        roles = roles_of(cluster, counts, machines)
        if builders.needs_environments(recipe):
            say(
                f"starting {recipe.env.num_envs} environments ({recipe.env.name}) on {workers} rollout worker{'s' if workers > 1 else ''}"
            )
        with launch_workers(
            parts, roles, cluster, say, machines, trainer_class(recipe), hub_locations(recipe)
        ) as launched:
            write_json(
                directory / PLACEMENT,
                {"workers": ask_where(launched.actors(), cluster.start_timeout_s)},
            )
            trainer = launched.trainers.worker_info
            for line in () if trainer.policy is None else trainer.policy.remarks:
                say(line)
            yield launched


@contextmanager
def launch_workers(
    builders: Mapping[str, Builders],
    roles: Mapping[str, Role],
    cluster: ClusterConfig,
    say: Say,
    machines: Cluster | None = None,
    learner: type[TrainerWorker] = TrainerWorker,
    downloads: Sequence[str] = (),
) -> Iterator[Workers]:
    """Start workers in the connected cluster and stop them at the end. ``builders``: by role.

    ``machines``: those of the roles' slots. ``learner``: of the trainer's workers. ``downloads``:
    what they load from the Hub. Raises UserError if the cluster has no room.
    """
    import ray

    require_room(ray.nodes(), roles, machines)
    remote: Any = ray.remote
    with ExitStack() as stack:
        places = stack.enter_context(
            reserve_places(roles, cluster.start_timeout_s, cluster.spread, machines)
        )

        download_on_machines(downloads, places, cluster.call_timeout_s, say)
        groups = {HEALTH: 1, WEIGHTS: 1}
        beside = neighbours(places["rollout"])

        def spawn(
            kind: type, role: str, place: int, options: Mapping[str, Any] | None = None
        ) -> Any:
            actor = remote(
                max_restarts=0, concurrency_groups=groups, **options or places[role][place]
            )(kind)
            parts = builders[role]
            asked = []
            if kind is RolloutWorker:
                # of one that joins, the machine is not known: it counts with the fullest
                here = beside[place] if options is None else max(beside)
                parts = replace(parts, neighbours=here)
            if kind is RolloutWorker and features is not None:
                asked = [features.answering(place % len(features.actors))]
            return actor.remote(parts, place, *asked)

        def pool(kind: type, role: str) -> Pool | None:
            if not roles[role].count:
                return None
            workers = Pool(role, partial(spawn, kind, role), roles[role].count, cluster, say)
            stack.callback(workers.close)
            return workers

        features = pool(FeatureWorker, "feature")
        rollouts = pool(RolloutWorker, "rollout")
        assert rollouts is not None
        rewards = pool(RewardWorker, "reward")
        references = pool(ReferenceWorker, "reference")
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

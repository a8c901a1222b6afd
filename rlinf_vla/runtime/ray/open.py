"""Run a recipe's training flow on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlinf_vla.config.cluster import RoleConfig
from rlinf_vla.config.recipe import ON_POLICY, Recipe, RewardConfig
from rlinf_vla.core import plugins
from rlinf_vla.core.protocols import Policy, VectorEnv
from rlinf_vla.rollout.split import require_separable
from rlinf_vla.runtime import builders, run_directory
from rlinf_vla.runtime.base import Runtime, Say
from rlinf_vla.runtime.ray.cluster import Role, connect_cluster
from rlinf_vla.runtime.ray.launch import launch_flow, launch_workers
from rlinf_vla.runtime.ray.off_policy import open_off_policy
from rlinf_vla.runtime.ray.pool import Timeouts
from rlinf_vla.runtime.ray.worker import Builders
from rlinf_vla.training.checkpoint import load_checkpoint, load_earlier


@contextmanager
def open_on_ray(recipe: Recipe, directory: Path, checkpoint: Path | None, say: Say) -> Iterator[Runtime]:
    """Start the recipe's workers and restore ``checkpoint``. Raises UserError."""
    cluster = recipe.cluster
    split, on_policy = recipe.rollout.split == "head", recipe.algorithm.family == ON_POLICY
    if split:
        require_separable(plugins.choose("model", recipe.model.name, plugins.models()))
    references = cluster.reference_workers if on_policy and recipe.algorithm.kl_coef else 0
    roles = {
        "trainer": _role(cluster.trainer_ranks if on_policy else 0, cluster.roles.trainer),
        "rollout": _role(cluster.rollout_workers, cluster.roles.rollout),
        "reference": _role(references, cluster.roles.reference),
        "reward": _role(_reward_workers(recipe), cluster.roles.reward),
        "feature": _role(cluster.feature_workers if split else 0, cluster.roles.feature),
    }
    timeouts = Timeouts(cluster.heartbeat_s, cluster.call_timeout_s, cluster.start_timeout_s, cluster.max_restarts)
    builders = {role: _builders(recipe, role) for role in roles}
    workers, spread, options = cluster.rollout_workers, cluster.spread, dict[str, Any]()
    if on_policy:
        options = {"streaming": cluster.streaming, "offload": cluster.offload}
        options |= {"staleness": recipe.algorithm.staleness, "iterations": recipe.iterations}
    with connect_cluster(cluster.address, roles, say):
        say(f"starting {recipe.env.num_envs} environments ({recipe.env.name}) on {workers} rollout worker{'s' if workers > 1 else ''}")
        if not on_policy:
            with (
                launch_workers(builders, roles, timeouts, say, spread) as launched,
                open_off_policy(recipe, launched.rollouts, directory, checkpoint, say) as runtime,
            ):
                yield runtime
            return
        with launch_flow(builders, roles, timeouts, recipe.env.num_envs, say, spread, **options) as flow:
            trainer = flow.trainers.worker_info
            say(f"policy {recipe.model.name}: {trainer.weights:,} weights, {trainer.trained:,} of them trained")
            state = {}
            if checkpoint is not None:
                state = flow.trainers.call("restore", checkpoint)[0][0]
                flow.restore_earlier_weights(load_earlier(checkpoint))

            def save(state: dict[str, Any]) -> None:
                flow.write_checkpoint(directory / run_directory.CHECKPOINTS, state, recipe.checkpoints.keep)

            yield Runtime(flow, flow.env, flow.env.control_hz / flow.chunk, partial(flow.evaluate, recipe.episodes), save, state)


def _role(count: int, config: RoleConfig) -> Role:
    return Role(count, config.cpus, config.gpus, dict(config.resources), dict(config.labels))


def _reward_workers(recipe: Recipe) -> int:
    """Return the number of reward workers; 0 if the recipe uses the environments' own reward."""
    on_policy = recipe.algorithm.family == ON_POLICY  # otherwise the rollout workers compute it
    return recipe.cluster.reward_workers if on_policy and recipe.reward != RewardConfig() else 0


def _builders(recipe: Recipe, role: str) -> Builders:
    """Return the builder functions for workers of a role; without a GPU they use the CPU."""
    if getattr(recipe.cluster.roles, role).gpus == 0:
        recipe = replace(recipe, cluster=replace(recipe.cluster, device="cpu"))
    return Builders(
        policy=partial(_policy, recipe),
        head=partial(builders.build_head, recipe),
        environments=partial(_environments, recipe),
        trainer=partial(builders.build_trainer, recipe),
        algorithm=partial(builders.build_algorithm, recipe),
        reward_shaper=partial(builders.build_reward_shaper, recipe),
        device=recipe.cluster.device,
        heartbeat_s=recipe.cluster.heartbeat_s,
        call_timeout_s=recipe.cluster.call_timeout_s,
        sharded=recipe.cluster.trainer_sharding == "full",
        rewards_apart=_reward_workers(recipe) > 0,
        settings=builders.actor_settings(recipe, recipe.rollout.temperature),
        reuse_frozen=recipe.cluster.reuse_frozen,
        rollout_threads=partial(builders.threads, recipe.cluster.rollout_threads),
        update_threads=partial(builders.threads, recipe.cluster.update_threads),
    )


def _policy(recipe: Recipe) -> Policy:
    policy = builders.build_policy(recipe)
    if recipe.checkpoint is not None:
        load_checkpoint(Path(recipe.checkpoint).expanduser(), policy)
    return policy


@contextmanager
def _environments(recipe: Recipe, policy: Policy) -> Iterator[tuple[Sequence[VectorEnv], Sequence[VectorEnv]]]:
    share = replace(recipe, env=replace(recipe.env, num_envs=recipe.env.num_envs // recipe.cluster.rollout_workers))
    with builders.open_envs(share, policy, recipe.rollout.pipeline_depth) as groups:
        yield groups, builders.rewarded(share, groups)

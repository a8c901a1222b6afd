"""What no recipe may say, whatever it is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlinf_vla.flow.planning.plan import RUNTIMES, SPLITS
from rlinf_vla.recipe.robot import ACKNOWLEDGED_BY, ROBOT
from rlinf_vla.types import UserError, require_one_of

if TYPE_CHECKING:
    from rlinf_vla.recipe import Recipe

SHARDINGS = ("none", "full")
ON_POLICY = ("ppo", "grpo")
"""Algorithms that run on a cluster, too, and so have plans to choose from."""
PLANS = ("given", "auto")
NO_MODEL = "none"
"""The model of a recipe in which no policy learns."""
NO_ALGORITHM = "none"
"""The algorithm of a recipe in which nothing learns: it is for ``rlinf-vla eval``."""


def check(recipe: Recipe) -> None:
    """Raises UserError."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise UserError(message)

    preset = recipe.preset
    require(
        preset.name is None or (recipe.algorithm.name == preset.algorithm and recipe.model.name in preset.models),
        f"preset={preset.name} is for algorithm={preset.algorithm} and model={' or '.join(preset.models)}, recipe={recipe.name} has "
        f"algorithm={recipe.algorithm.name} and model={recipe.model.name} (`rlinf-vla list presets` names others)",
    )
    _check_robot(recipe, require)
    depth, batch = recipe.rollout.pipeline_depth, recipe.rollout.batch_size
    num_envs = recipe.env.num_envs
    cluster = recipe.cluster
    require_one_of("cluster.runtime", cluster.runtime, RUNTIMES)
    require_one_of("cluster.plan", cluster.plan, PLANS)
    plannable = recipe.algorithm.name in ON_POLICY or (cluster.plan == "given" and recipe.profile is None)
    require(plannable, f"cluster.plan and profile are for ppo and grpo: algorithm={recipe.algorithm.name} runs in one process")
    require(cluster.replan_after >= 0, f"cluster.replan_after={cluster.replan_after}: must not be negative")
    require_one_of("cluster.trainer_sharding", cluster.trainer_sharding, SHARDINGS)
    require_one_of("rollout.split", recipe.rollout.split, SPLITS)
    require(recipe.rollout.split == "none" or cluster.runtime == "ray", "rollout.split=head wants cluster.runtime=ray")
    for name in ("rollout_workers", "trainer_ranks", "feature_workers"):
        require(getattr(cluster, name) >= 1, f"cluster.{name}={getattr(cluster, name)}: must be at least 1")
        in_one = cluster.runtime == "ray" or getattr(cluster, name) == 1
        require(in_one, f"cluster.{name}={getattr(cluster, name)} wants cluster.runtime=ray")
    require(cluster.trainer_restarts >= 0, f"cluster.trainer_restarts={cluster.trainer_restarts}: must not be negative")
    turns = getattr(recipe.algorithm, "staleness", 0) == 0 and cluster.trainer_sharding == "none"
    require(turns or not cluster.offload, "cluster.offload=true takes turns: set algorithm.staleness=0 and cluster.trainer_sharding=none")
    for name in ("heartbeat_s", "call_timeout_s", "start_timeout_s"):
        require(getattr(cluster, name) > 0, f"cluster.{name}={getattr(cluster, name)}: must be above 0")
    per_worker, workers = num_envs // cluster.rollout_workers, cluster.rollout_workers
    require(num_envs % workers == 0, f"env.num_envs={num_envs} is not a multiple of cluster.rollout_workers={workers}")
    require(recipe.iterations >= 0, f"iterations={recipe.iterations}: must not be negative")
    require(num_envs >= 1, f"env.num_envs={num_envs}: must be at least 1")
    require(depth >= 1, f"rollout.pipeline_depth={depth}: must be at least 1")
    each = f"env.num_envs={num_envs}" if workers == 1 else f"env.num_envs / cluster.rollout_workers = {per_worker}"
    require(per_worker % depth == 0, f"{each} is not a multiple of rollout.pipeline_depth={depth}: groups must be equal")
    require(batch >= 1, f"rollout.batch_size={batch}: must be at least 1")
    require(
        (per_worker // depth) % batch == 0 or batch >= per_worker // depth,
        f"rollout.batch_size={batch} does not divide a group's {per_worker // depth} environments ({each}, / rollout.pipeline_depth)",
    )
    require(recipe.rollout.temperature > 0, f"rollout.temperature={recipe.rollout.temperature}: must be above 0 to explore")
    require(recipe.cluster.device in ("cpu", "cuda"), f"cluster.device={recipe.cluster.device}: choose cpu or cuda")
    require(recipe.cluster.micro_batch_size >= 1, f"cluster.micro_batch_size={recipe.cluster.micro_batch_size}: must be at least 1")
    for name in ("minibatch_size", "epochs", "horizon", "batch_size"):
        value = getattr(recipe.algorithm, name, 1)
        require(value >= 1, f"algorithm.{name}={value}: must be at least 1")
    require(recipe.checkpoints.every >= 1 and recipe.checkpoints.keep >= 1, "checkpoints.every and checkpoints.keep must be at least 1")
    require(recipe.episodes >= 1, f"episodes={recipe.episodes}: must be at least 1")
    require(
        recipe.algorithm.name == NO_ALGORITHM or (recipe.algorithm.name == "classifier") == (recipe.model.name == NO_MODEL),
        f"algorithm={recipe.algorithm.name} with model={recipe.model.name}: a reward classifier, and only it, has model={NO_MODEL}",
    )
    for mode in recipe.evaluation.modes:
        require(mode in ("sampled", "greedy"), f"evaluation.modes: {mode!r} is not known, choose sampled, greedy or both")
    for name in ("block", "parallel"):
        require(getattr(recipe.sweep, name) >= 1, f"sweep.{name}={getattr(recipe.sweep, name)}: must be at least 1")


def _check_robot(recipe: Recipe, require: Callable[[bool, str], None]) -> None:
    at_robot, session = recipe.env.name == ROBOT, recipe.session
    require(
        at_robot or recipe.robot is None, f"robot={getattr(recipe.robot, 'name', '')} wants env=robot, the recipe has env={recipe.env.name}"
    )
    require_one_of("session.acknowledge", session.acknowledge, ACKNOWLEDGED_BY)
    for name in ("connect_s", "home_s", "silence_s"):
        require(getattr(session, name) > 0, f"session.{name}={getattr(session, name)}: must be above 0")
    connect, silence = session.connect_s, session.silence_s
    mute = "the process beside the robot says nothing while it connects, and would count as hung"
    require(connect < silence, f"session.connect_s={connect} is not under session.silence_s={silence}: {mute}")
    require(0 <= session.learner_nice <= 19, f"session.learner_nice={session.learner_nice}: between 0 and 19")
    require(session.minutes is None or session.minutes > 0, f"session.minutes={session.minutes}: must be above 0, or null")
    require(session.patience_s is None or session.patience_s >= 0, f"session.patience_s={session.patience_s}: must not be negative")
    if not at_robot:
        return
    require(recipe.robot is not None, "env=robot wants to know which: give robot=NAME (`rlinf-vla list robots` names them)")
    require(recipe.env.num_envs == 1, f"env.num_envs={recipe.env.num_envs}: there is one robot")
    require(recipe.env.episode_limit >= 1, f"env.episode_limit={recipe.env.episode_limit}: must be at least 1")
    require(
        recipe.algorithm.name == "sac", f"algorithm={recipe.algorithm.name} does not learn at a robot, one episode at a time: algorithm=sac"
    )
    require(recipe.cluster.trainer_ranks == 1, f"cluster.trainer_ranks={recipe.cluster.trainer_ranks}: a robot's learner is one process")
    require(not recipe.sweep.policies, "sweep.policies is for simulators: evaluate one checkpoint after the other at a robot")
    require(recipe.algorithm.gamma_unit == "step", f"algorithm.gamma_unit={recipe.algorithm.gamma_unit}: at a robot time counts in steps")
    require(recipe.algorithm.noise_bound is None, "algorithm.noise_bound: at a robot the actor chooses actions, as a person does")

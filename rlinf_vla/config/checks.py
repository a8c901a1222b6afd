"""Check recipe values against each other; ``ranges`` checks single keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import NO_ALGORITHM, OFF_POLICY, ON_POLICY, SUPERVISED
from rlinf_vla.config.robot import ROBOT

if TYPE_CHECKING:
    from rlinf_vla.config.recipe import Recipe

NO_MODEL = "none"
"""Model name of a recipe that trains no policy but a reward classifier."""


def check(recipe: Recipe) -> None:
    """Raise UserError if recipe values contradict each other."""

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
    algorithm = recipe.algorithm
    family = f"algorithm={algorithm.name} is {algorithm.family}"
    plannable = algorithm.family == ON_POLICY or (cluster.plan == "given" and recipe.profile is None)
    require(plannable, f"cluster.plan and profile are for on-policy algorithms: {family}")
    require(recipe.rollout.split == "none" or cluster.runtime == "ray", "rollout.split=head needs cluster.runtime=ray")
    require(algorithm.family != SUPERVISED or cluster.runtime != "ray", f"{family} and runs in one process: use cluster.runtime=in_process")
    one_learner = cluster.trainer_ranks == 1 and recipe.rollout.split == "none" and cluster.trainer_sharding == "none"
    require(algorithm.family != OFF_POLICY or one_learner, f"{family}: its learner is one process (trainer_ranks=1, no split or sharding)")
    for name in ("rollout_workers", "trainer_ranks", "feature_workers"):
        in_one = cluster.runtime == "ray" or getattr(cluster, name) == 1
        require(in_one, f"cluster.{name}={getattr(cluster, name)} needs cluster.runtime=ray")
    turns = getattr(recipe.algorithm, "staleness", 0) == 0
    require(turns or not cluster.offload, "cluster.offload=true needs algorithm.staleness=0")
    per_worker, workers = num_envs // cluster.rollout_workers, cluster.rollout_workers
    require(num_envs % workers == 0, f"env.num_envs={num_envs} is not a multiple of cluster.rollout_workers={workers}")
    each = f"env.num_envs={num_envs}" if workers == 1 else f"env.num_envs / cluster.rollout_workers = {per_worker}"
    require(per_worker % depth == 0, f"{each} is not a multiple of rollout.pipeline_depth={depth}: groups must be equal")
    require(
        (per_worker // depth) % batch == 0 or batch >= per_worker // depth,
        f"rollout.batch_size={batch} does not divide a group's {per_worker // depth} environments ({each}, / rollout.pipeline_depth)",
    )
    require(
        algorithm.name == NO_ALGORITHM or algorithm.trains_reward == (recipe.model.name == NO_MODEL),
        f"algorithm={recipe.algorithm.name} with model={recipe.model.name}: a reward classifier, and only it, has model={NO_MODEL}",
    )


def _check_robot(recipe: Recipe, require: Callable[[bool, str], None]) -> None:
    at_robot, session = recipe.env.name == ROBOT, recipe.session
    require(
        at_robot or recipe.robot is None, f"robot={getattr(recipe.robot, 'name', '')} needs env=robot, the recipe has env={recipe.env.name}"
    )
    connect, silence = session.connect_s, session.silence_s
    mute = "the robot process sends nothing while it connects, and would count as hung"
    require(connect < silence, f"session.connect_s={connect} is not under session.silence_s={silence}: {mute}")
    if not at_robot:
        return
    require(recipe.robot is not None, "env=robot needs a robot: give robot=NAME (`rlinf-vla list robots` names them)")
    require(
        recipe.algorithm.family == OFF_POLICY,
        f"algorithm={recipe.algorithm.name} cannot learn at a robot, in single episodes: set algorithm=sac",
    )
    require(recipe.cluster.trainer_ranks == 1, f"cluster.trainer_ranks={recipe.cluster.trainer_ranks}: a robot's learner is one process")
    require(not recipe.sweep.policies, "sweep.policies is for simulators: at a robot evaluate one checkpoint at a time")
    require(recipe.algorithm.gamma_unit == "step", f"algorithm.gamma_unit={recipe.algorithm.gamma_unit}: at a robot use gamma_unit=step")
    require(recipe.algorithm.noise_bound is None, "algorithm.noise_bound: at a robot the actor must choose actions, use null")

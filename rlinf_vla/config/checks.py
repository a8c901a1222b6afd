"""Check recipe values against each other; ``ranges`` checks single keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlinf_vla.config.cluster import BROADCAST, GIVEN, MEASURED, RAY
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import (
    EXPERT,
    INTERACTIVE,
    NO_ALGORITHM,
    OFF_POLICY,
    ON_POLICY,
    DeadlineConfig,
    LimitsConfig,
    RewardConfig,
)
from rlinf_vla.config.robot import ROBOT

if TYPE_CHECKING:
    from rlinf_vla.config.recipe import Recipe

NO_MODEL = "none"
"""Model name of a recipe that trains no policy but a reward classifier."""


def may_offload(recipe: Recipe) -> bool:
    """Return whether no rollout runs during an update, so that roles can take turns on a device."""
    return recipe.algorithm.family == ON_POLICY and getattr(recipe.algorithm, "staleness", 0) == 0


def check(recipe: Recipe) -> None:
    """Raise UserError if recipe values contradict each other."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise UserError(message)

    preset = recipe.preset
    require(
        preset.name is None
        or (recipe.algorithm.name == preset.algorithm and recipe.model.name in preset.models),
        f"preset={preset.name} is for algorithm={preset.algorithm} and model={' or '.join(preset.models)}, recipe={recipe.name} has "
        f"algorithm={recipe.algorithm.name} and model={recipe.model.name} (`rlinf-vla list presets` names others)",
    )
    _check_robot(recipe, require)
    _check_deadline(recipe, require)
    _check_limits(recipe, require)
    _check_evaluation(recipe, require)
    cluster = recipe.cluster
    algorithm = recipe.algorithm
    family = f"algorithm={algorithm.name} is {algorithm.family}"
    on_policy = algorithm.family == ON_POLICY
    require(on_policy or recipe.profile is None, f"profile is for on-policy algorithms: {family}")
    _check_split(recipe, require)
    require(
        algorithm.acts or recipe.rollout.split == "none",
        f"rollout.split=head is for policies: what algorithm={algorithm.name} trains does not act, leave rollout.split out",
    )
    if algorithm.family == OFF_POLICY:
        whole = recipe.rollout.split == "none" and cluster.trainer_sharding == "none"
        require(whole, f"{family}: use rollout.split=none and cluster.trainer_sharding=none")
        require(
            cluster.trainer_ranks <= algorithm.episodes,
            f"cluster.trainer_ranks={cluster.trainer_ranks} is more than algorithm.episodes={algorithm.episodes}: "
            "each rank stores episodes of its own, use fewer ranks or more episodes per iteration",
        )
    if cluster.trainer_split == MEASURED:
        require(
            on_policy,
            f"cluster.trainer_split=measured is for on-policy algorithms: {family}, use even",
        )
        require(
            cluster.trainer_sharding == "none",
            "cluster.trainer_split=measured: ranks of cluster.trainer_sharding=full make equally many passes, use even",
        )
    for name in ("rollout_workers", "shards_per_worker", "trainer_ranks", "feature_workers"):
        in_one = cluster.runtime == "ray" or getattr(cluster, name) == 1
        require(in_one, f"cluster.{name}={getattr(cluster, name)} needs cluster.runtime=ray")
    reached = cluster.address is None or cluster.runtime == RAY
    require(
        reached,
        f"cluster.address={cluster.address} needs cluster.runtime=ray: leave it out, or set both",
    )
    require(
        may_offload(recipe) or not cluster.offload,
        "cluster.offload=true is for on-policy algorithms without staleness: leave it out",
    )
    apart = cluster.weights != BROADCAST or not cluster.offload
    require(
        apart,
        "cluster.weights=broadcast takes the memory that cluster.offload=true frees: use cluster.weights=auto",
    )
    unshared = cluster.plan == GIVEN or cluster.shards_per_worker == 1
    require(
        unshared,
        f"cluster.shards_per_worker={cluster.shards_per_worker} needs cluster.plan=given: no plan is predicted for it",
    )
    if (cluster.plan == GIVEN or not on_policy) and recipe.env.name != ROBOT:
        _check_groups(recipe, require)
    require(
        algorithm.name == NO_ALGORITHM
        or algorithm.trains_reward == (recipe.model.name == NO_MODEL),
        f"algorithm={recipe.algorithm.name} with model={recipe.model.name}: a reward classifier, and only it, has model={NO_MODEL}",
    )


def _check_split(recipe: Recipe, require: Callable[[bool, str], None]) -> None:
    split = recipe.rollout.split == "head"
    url = recipe.rollout.backbone.url
    ray = recipe.cluster.runtime == RAY
    require(
        not split or ray or url is not None,
        "rollout.split=head needs cluster.runtime=ray, or the server of rollout.backbone.url",
    )
    require(url is None or split, f"rollout.backbone.url={url} needs rollout.split=head")
    require(
        url is None or not ray,
        f"rollout.backbone.url={url} needs cluster.runtime=in_process: Ray has feature workers for it",
    )


def _check_groups(recipe: Recipe, require: Callable[[bool, str], None]) -> None:
    """Check that the environments divide into equal groups; a predicted plan divides them."""
    num_envs = recipe.env.num_envs
    shards = recipe.cluster.shards
    name = "cluster.rollout_workers"
    if recipe.cluster.shards_per_worker > 1:
        name += " x shards_per_worker"
    depth = recipe.rollout.pipeline_depth
    batch = recipe.rollout.batch_size
    per_worker = num_envs // shards
    require(num_envs % shards == 0, f"env.num_envs={num_envs} is not a multiple of {name}={shards}")
    subject = f"env.num_envs={num_envs}" if shards == 1 else f"env.num_envs / {name} = {per_worker}"
    require(
        per_worker % depth == 0,
        f"{subject} is not a multiple of rollout.pipeline_depth={depth}: groups must be equal",
    )
    require(
        (per_worker // depth) % batch == 0 or batch >= per_worker // depth,
        f"rollout.batch_size={batch} does not divide a group's {per_worker // depth} environments ({subject}, / rollout.pipeline_depth)",
    )


def _check_deadline(recipe: Recipe, require: Callable[[bool, str], None]) -> None:
    if recipe.rollout.deadline == DeadlineConfig():
        return
    unit = getattr(recipe.algorithm, "gamma_unit", "step")
    require(
        not recipe.sweep.policies,
        "rollout.deadline is for one policy: leave sweep.policies out, and use --multirun",
    )
    require(
        recipe.env.name != ROBOT,
        "rollout.deadline is for simulators: a robot has delays of its own",
    )
    require(
        unit == "step", f"algorithm.gamma_unit={unit}: with rollout.deadline use gamma_unit=step"
    )
    require(
        getattr(recipe.algorithm, "teacher", None) != EXPERT,
        f"rollout.deadline: algorithm={recipe.algorithm.name} plays single steps, so that the expert labels each, leave it out",
    )
    predicted = recipe.cluster.plan != GIVEN or recipe.profile is not None
    require(
        not predicted,
        "rollout.deadline: no plan is predicted for it, use cluster.plan=given and no profile",
    )
    apart = (
        recipe.reward == RewardConfig()
        or recipe.cluster.reward_workers == 0
        or recipe.algorithm.family != ON_POLICY
    )
    require(
        apart,
        "rollout.deadline: rewards are computed in the rollout workers, use cluster.reward_workers=0",
    )


def _check_limits(recipe: Recipe, require: Callable[[bool, str], None]) -> None:
    limits = recipe.rollout.limits
    at_robot = recipe.env.name == ROBOT
    limit = getattr(recipe.algorithm, "cost_limit", None)
    if limits == LimitsConfig():
        message = f"algorithm.cost_limit={limit}: nothing counts a cost here, set rollout.limits or learn at a robot"
        require(limit is None or at_robot, message)
        return
    require(
        not recipe.sweep.policies,
        "rollout.limits is for one policy: leave sweep.policies out, and use --multirun",
    )
    require(
        not at_robot, "rollout.limits is for simulators: a robot has the limits of its cell file"
    )
    box = list(limits.workspace)
    ordered = len(box) == 6 and all(low < high for low, high in zip(box[:3], box[3:], strict=True))
    message = f"rollout.limits.workspace={box} is not a box: give [x0,y0,z0,x1,y1,z1] in metres with x0 < x1, y0 < y1 and z0 < z1"
    require(not box or ordered, message)


def _check_evaluation(recipe: Recipe, require: Callable[[bool, str], None]) -> None:
    none = "evaluation.modes is empty: choose sampled, greedy or both (evaluation.before_and_after=false trains without evaluation)"
    require(bool(recipe.evaluation.modes), none)
    probes = recipe.evaluation.probes
    twice = sorted({probe for probe in probes if probes.count(probe) > 1})
    require(not twice, f"evaluation.probes names {twice[0] if twice else ''} twice")
    require(
        not probes or recipe.env.name != ROBOT,
        "evaluation.probes is for simulators: a robot cannot repeat an episode, leave it out",
    )


def _check_robot(recipe: Recipe, require: Callable[[bool, str], None]) -> None:
    at_robot = recipe.env.name == ROBOT
    session = recipe.session
    require(
        at_robot or recipe.robot is None,
        f"robot={getattr(recipe.robot, 'name', '')} needs env=robot, the recipe has env={recipe.env.name}",
    )
    connect, silence = session.connect_s, session.silence_s
    mute = "the robot process sends nothing while it connects, and would count as hung"
    require(
        connect < silence,
        f"session.connect_s={connect} is not under session.silence_s={silence}: {mute}",
    )
    by_operator = recipe.algorithm.family == INTERACTIVE
    require(
        at_robot or not by_operator,
        f"algorithm={recipe.algorithm.name}: an operator corrects the policy at a robot, set env=robot",
    )
    if not at_robot:
        return
    require(
        not hasattr(recipe.algorithm, "teacher"),
        f"algorithm={recipe.algorithm.name}: a teacher labels what is visited in a simulator, set algorithm=hg_dagger at a robot",
    )
    require(
        recipe.robot is not None,
        "env=robot needs a robot: give robot=NAME (`rlinf-vla list robots` names them)",
    )
    require(
        recipe.cluster.trainer_ranks == 1,
        f"cluster.trainer_ranks={recipe.cluster.trainer_ranks}: a robot's learner is one process",
    )
    require(
        not recipe.sweep.policies,
        "sweep.policies is for simulators: at a robot evaluate one checkpoint at a time",
    )
    unit = recipe.algorithm.gamma_unit if recipe.algorithm.family == OFF_POLICY else "step"
    require(unit == "step", f"algorithm.gamma_unit={unit}: at a robot use gamma_unit=step")

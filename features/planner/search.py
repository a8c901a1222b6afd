"""Print an algorithm's macro flow, the plan predicted to be fastest on a cluster, and why."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlinf_vla.config.cluster import AUTO, MEASURED, RAY
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import ON_POLICY, SUPERVISED, Recipe
from rlinf_vla.core.io import write_json
from rlinf_vla.features.planner.budget import budget, room_in, setting_of
from rlinf_vla.features.planner.choice import Choice, NoRoom, choose
from rlinf_vla.features.planner.graph import Graph, trace
from rlinf_vla.features.planner.memory import MemoryModel
from rlinf_vla.features.planner.plan import (
    IN_CLUSTER,
    IN_ROLLOUT,
    Plan,
    Problem,
    device_hours,
    place,
)
from rlinf_vla.features.planner.prediction import Prediction
from rlinf_vla.features.planner.preview import Preview, preview_of
from rlinf_vla.features.planner.profile import Profile
from rlinf_vla.features.planner.profiles import profiles_for
from rlinf_vla.features.planner.simulate import simulate
from rlinf_vla.features.planner.workload import Workload
from rlinf_vla.rollout.collector import rollout_calls
from rlinf_vla.runtime import builders, recipes, run_directory
from rlinf_vla.runtime.machines import Cluster, broadcasts, describe
from rlinf_vla.telemetry.environment import fingerprint

SHARDED = (
    "no plan fits unless the trainer is sharded over the GPUs: cluster.trainer_sharding=full is set"
)


def plan_problem(
    recipe: Recipe, model: MemoryModel | None = None
) -> tuple[Problem, Profile | None]:
    """Return the problem of a recipe's plan, and the profile that was measured here, if one was.

    ``model``: the recipe's, if it is there already. Raises UserError.
    """
    graph = trace(builders.build_algorithm(recipe))
    cluster = describe(recipe.cluster)
    counts_memory = recipe.cluster.on_accelerator
    if model is None and counts_memory:
        model = MemoryModel(recipe)
    profiles, measured = profiles_for(recipe, cluster, model)
    work = workload(recipe, graph, next(iter(profiles.values())))
    problem = Problem(graph, work, cluster, profiles, recipe.cluster.rows)
    if model is not None and counts_memory:
        problem = replace(problem, refuse=partial(_refuse, recipe, model, cluster))
    return problem, measured


def planned_problem(
    recipe: Recipe, model: MemoryModel | None
) -> tuple[Recipe, Problem, Choice, Profile | None]:
    """Return the recipe, its problem, the plan to run, and the profile if one was measured here.

    If no plan fits into the GPUs' memory, the recipe's trainer is sharded over them. ``model``: see
    ``plan_problem``. Raises UserError.
    """
    problem, measured = plan_problem(recipe, model)
    try:
        return recipe, problem, choose(problem), measured
    except NoRoom as error:
        cluster = recipe.cluster
        if (
            not cluster.on_accelerator
            or cluster.trainer_sharding != "none"
            or cluster.trainer_split == MEASURED
            or problem.cluster.gpus < 2
        ):
            raise
        alone = str(error)
    recipe = replace(recipe, cluster=replace(recipe.cluster, trainer_sharding="full"))
    if model is not None:
        model.recipe = recipe
    problem, measured = plan_problem(recipe, model)
    try:
        return recipe, problem, choose(problem), measured
    except NoRoom as error:
        raise UserError(f"{alone}; sharded (cluster.trainer_sharding=full): {error}") from None


def _refuse(recipe: Recipe, model: MemoryModel, cluster: Cluster, plan: Plan) -> None:
    """Raise UserError if the counted memory of a trainer's device does not suffice for ``plan``."""
    model.recipe = with_plan(recipe, plan)
    try:
        count = budget(
            model, setting_of(model.recipe), place(plan, cluster)[0].node.memory, exact=False
        )
    finally:
        model.recipe = recipe
    if not count.fits:
        raise UserError(
            f"{count.peak / 1e9:.1f} GB wanted in a device with a trainer, {room_in(count.memory)}"
        )


def only_plan(recipe: Recipe) -> Plan:
    """Return the plan of a recipe whose algorithm has one: imitation divides its batches among all
    GPUs, for other algorithms it is what the recipe's own keys describe. A reward's network is
    small, so it is not divided unless the recipe says so."""
    shares = (
        recipe.algorithm.family == SUPERVISED
        and not recipe.algorithm.trains_reward
        and recipe.cluster.on_gpus
    )
    ranks = min(describe(recipe.cluster).gpus, recipe.algorithm.batch_size) if shares else 1
    return (
        replace(plan_of(recipe), runtime=RAY, trainer_ranks=ranks) if ranks > 1 else plan_of(recipe)
    )


def plan_of(recipe: Recipe) -> Plan:
    """Return the plan that the recipe's own keys describe."""
    keys = {name: getattr(recipe.cluster, name) for name in IN_CLUSTER} | {
        "micro_batch_size": recipe.cluster.rows
    }
    return Plan(**keys, **{name: getattr(recipe.rollout, name) for name in IN_ROLLOUT})


def with_plan(recipe: Recipe, plan: Plan) -> Recipe:
    """Return the recipe with the settings of ``plan``."""
    cluster = replace(recipe.cluster, **{name: getattr(plan, name) for name in IN_CLUSTER})
    return replace(
        recipe,
        cluster=cluster,
        rollout=replace(recipe.rollout, **{name: getattr(plan, name) for name in IN_ROLLOUT}),
    )


def run(config: DictConfig) -> dict[str, Any]:
    """Print the graph and the chosen plan; write plan.json, plan_trace.json and the profile.

    Returns the document of plan.json; recipe and plan alone if the algorithm has only one plan.
    ``output``: file for the recipe under this plan. Raises UserError.
    """
    config.cluster.plan = AUTO  # keys that the plan replaces are not checked
    recipe = recipes.read(config)
    builders.require_whole(recipe, "nothing to train")
    output = None if config.output is None else _new_file(config.output)
    print(trace(builders.build_algorithm(recipe)).render())
    if recipe.algorithm.family != ON_POLICY:
        print(
            f"\nalgorithm={recipe.algorithm.name}: there is one plan, and nothing to choose: {only_plan(recipe)}"
        )
        return {"recipe": recipe.name, "chosen": {"plan": asdict(only_plan(recipe))}}
    preview = _preview(config)
    recipe = preview.recipe
    print(f"\ncluster {recipe.cluster.name}: {describe(recipe.cluster)}")
    unsharded = recipe.cluster.trainer_sharding
    recipe, problem, choice, measured = planned_problem(recipe, preview.model)
    config.cluster.trainer_sharding = recipe.cluster.trainer_sharding
    if recipe.cluster.trainer_sharding != unsharded:
        print(SHARDED)
    _show(choice, problem, recipe)
    preview.show(with_plan(recipe, choice.best.plan))
    for reason in preview.missing:
        print(f"this plan cannot run here: {reason}")
    directory = run_directory.for_evaluation(config, None)
    if measured is not None:
        measured.write(directory / "profile.json")
        print(f"profile: {builders.relative(directory / 'profile.json')}")
    document = _write(directory, recipe, problem, choice)
    if output is not None:
        write_plan(output, config, choice.best.plan)
        print(f"to run it: rlinf-vla train plan={config.output}")
    return document


def write_plan(path: Path, config: DictConfig, plan: Plan) -> None:
    """Write the recipe under ``plan``, which `rlinf-vla train plan=FILE` runs."""
    config = config.copy()
    for key, value in plan.keys().items():
        OmegaConf.update(config, key, value)
    config.output = None
    config.run_dir = None
    run_directory.save_recipe(path, config)


def _new_file(output: str) -> Path:
    path = Path(output).expanduser().absolute()
    if path.exists() or not path.parent.is_dir():
        why = (
            "exists already"
            if path.exists()
            else f"cannot be written: {path.parent} is no directory"
        )
        raise UserError(f"output={output} {why}: choose another file")
    return path


def _preview(config: DictConfig) -> Preview:
    """Count the recipe's memory. If what a measurement needs is missing, print it, and raise
    UserError."""
    preview = preview_of(config)
    recipe = preview.recipe
    if preview.missing and not (recipe.cluster.nodes or recipe.profile):
        preview.show(
            replace(recipe, cluster=replace(recipe.cluster, micro_batch_size=preview.rows()))
        )
        preview.require_nothing()
    return preview


def workload(recipe: Recipe, graph: Graph, profile: Profile) -> Workload:
    """Return the work of one iteration of the recipe.

    Raises UserError if the profile has another episode limit or the horizon is no multiple of it.
    """
    config, limit = recipe.algorithm, profile.episode_limit
    if recipe.env.episode_limit not in (None, limit):
        raise UserError(
            f"the profile has episodes of {limit} control steps, env.episode_limit={recipe.env.episode_limit}: measure again"
        )
    horizon = getattr(config, "horizon", limit)
    if horizon < 1 or horizon % limit:
        raise UserError(
            f"algorithm.horizon={horizon} is not a multiple of the episode limit of {limit} control steps"
        )
    slots = "collect" in graph
    sharded = recipe.cluster.trainer_sharding != "none"
    return Workload(
        envs=recipe.env.num_envs,
        batch_size=recipe.rollout.batch_size,
        minibatch_size=config.minibatch_size,
        epochs=config.epochs,
        episode_calls=-(-limit // profile.chunk),
        chunk=profile.chunk,
        calls=rollout_calls(horizon, limit, profile.chunk) if slots else None,
        listed=getattr(config, "episodes", 0),
        lengths=profile.episodes,
        groups_per_step=getattr(config, "groups_per_step", None),
        attempts=getattr(config, "group_size", 1),
        rewarded="reward" in profile.operations,
        reference=config.kl_coef > 0,
        proximal=config.decoupled
        or (profile.rounded if config.recompute_log_prob is None else config.recompute_log_prob),
        fixes=bool(recipe.cluster.reuse_frozen) and config.epochs > 1 and not sharded,
        critic=slots,
        broadcast=broadcasts(replace(recipe.cluster, offload=False)),
        sharded=sharded,
        measured=recipe.cluster.trainer_split == MEASURED,
        row_groups=config.row_groups,
        processes=getattr(recipe.env, "processes", None),
    )


def _show(choice: Choice, problem: Problem, recipe: Recipe) -> None:
    best = choice.best
    for profile in problem.profiles.values():
        print(f"costs: {profile.note}")
    print(f"\n{choice.explain()}\n")
    price = (
        ""
        if best.price is None
        else f", {best.price:.4g} (in the currency of cluster.nodes) per iteration"
    )
    print(
        f"{problem.kind}: {best.seconds:.4g} s per iteration, {best.steps_per_s:,.0f} control steps/s at most{price}"
    )
    print(
        "busy: "
        + ", ".join(
            f"{name} {100 * share:.0f} %"
            for name, share in best.utilisation.items()
            if share >= 0.01
        )
    )
    if gain := gain_of_measured(problem, best):
        print(gain)
    print(whole_run(recipe, problem, best))
    print(f"\n{best.picture()}\n")
    print(f"its keys: {' '.join(_overrides(choice, problem))}")


def gain_of_measured(problem: Problem, best: Prediction) -> str:
    """Return a line on ``cluster.trainer_split=measured`` if it saves 1 % of the time, else ""."""
    load = problem.workload
    if load.measured or load.sharded or best.plan.trainer_ranks == 1:
        return ""
    other = simulate(replace(problem, workload=replace(load, measured=True)), best.plan)
    if other.seconds > 0.99 * best.seconds:
        return ""
    return (
        f"the slowest trainer rank limits the update: cluster.trainer_split=measured is {problem.kind} "
        f"to take {other.seconds:.4g} s per iteration"
    )


def whole_run(recipe: Recipe, problem: Problem, prediction: Prediction) -> str:
    """Return a line on the time of the recipe's iterations, its device hours by role, its price."""
    hours = recipe.iterations * prediction.seconds / 3600
    unit = "GPU" if problem.cluster.gpus else "core"
    parts = device_hours(prediction.plan, problem.cluster, hours)
    used = ", ".join(f"{role} {amount:.3g}" for role, amount in parts.items())
    price = problem.cluster.price_per_hour
    cost = (
        "" if price is None else f"; price {price * hours:,.4g} (in the currency of cluster.nodes)"
    )
    return f"{recipe.iterations} iterations: {hours:.3g} hours; {unit} hours: {used}{cost}"


def _overrides(choice: Choice, problem: Problem) -> list[str]:
    """Return the keys of the chosen plan, KEY=VALUE."""
    sharded = ["cluster.trainer_sharding=full"] if problem.workload.sharded else []
    return [*choice.best.plan.overrides(), *sharded]


def _write(directory: Path, recipe: Recipe, problem: Problem, choice: Choice) -> dict[str, Any]:
    others = [
        {
            "plan": asdict(candidate.plan),
            "seconds": candidate.seconds,
            "played": candidate.prediction is not None,
        }
        for candidate in choice.fitting
    ]
    document: dict[str, Any] = {
        "recipe": recipe.name,
        "cluster": asdict(problem.cluster),
        "operations": [asdict(operation) for operation in problem.graph.operations],
        "edges": [asdict(edge) for edge in problem.graph.edges],
        "assumed": problem.assumed,
        "profiles": {device: asdict(profile) for device, profile in problem.profiles.items()},
        "chosen": choice.best.document(),
        "overrides": _overrides(choice, problem),
        "explanation": choice.explain(),
        "plans": others,
        "refused": [{"plan": asdict(plan), "reason": reason} for plan, reason in choice.refused],
        "environment": fingerprint(),
    }
    write_json(directory / "plan.json", document)
    choice.best.timeline().write(directory / "plan_trace.json")
    numbers, picture = (
        builders.relative(directory / name) for name in ("plan.json", "plan_trace.json")
    )
    print(f"numbers: {numbers}; timeline for ui.perfetto.dev: {picture}")
    return document

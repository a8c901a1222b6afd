from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlinf_vla.algorithms.ppo import PPOConfig
from rlinf_vla.config.cluster import ClusterConfig, NodeConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import ModelConfig, Recipe
from rlinf_vla.features.planner import search
from rlinf_vla.features.planner.choice import TIE_TOLERANCE, candidates, choose, divides
from rlinf_vla.features.planner.plan import Plan, Problem
from rlinf_vla.features.planner.profile import Bytes, Cost
from rlinf_vla.features.planner.simulate import simulate
from rlinf_vla.runtime.machines import Cluster
from rlinf_vla.testing.toy_env import CounterConfig
from tests.features.planner.made_up import (
    BYTES,
    COSTS,
    cluster,
    on_gpu,
    ppo,
    problem,
    profile,
    workload,
)

KNOWN = {"cpu": profile(), "fast": on_gpu("fast")}
SMALL = cluster(cpus=2)
GPUS = {"gpus": 4, "gpu": "fast", "gpu_memory_gb": 80.0}
LOAD = workload(envs=16, processes=2)
RECIPE = Recipe(
    name="toy",
    iterations=1,
    seed=7,
    env=CounterConfig(),
    model=ModelConfig("linear", None, None),
    algorithm=PPOConfig(),
    cluster=ClusterConfig(name="made_up", device="cuda"),
)


def test_the_choice_is_the_best_of_all() -> None:
    """Compared with a full simulation of every plan."""
    for machines in (SMALL, cluster(cpus=8), cluster(2, cpus=4), cluster(**GPUS)):
        wanted = problem(LOAD, machines, KNOWN)
        found = choose(wanted)
        times = [simulate(wanted, each.plan).seconds for each in found.fitting]
        assert found.best.seconds <= (1 + TIE_TOLERANCE) * min(times)
        for each, seconds in zip(found.fitting, times, strict=True):
            assert each.least <= seconds * (1 + 1e-6), "a bound"
            assert each.prediction is None or each.prediction.seconds == pytest.approx(seconds)


def test_a_small_gain_does_not_justify_more_processes() -> None:
    """If the update takes nearly all the time, one process without a pipeline suffices."""
    slow = {"cpu": profile(operations=COSTS | {"update": Cost(0.0, 100.0, cores=2.0)})}
    assert choose(problem(LOAD, SMALL, slow)).best.plan == Plan(pipeline_depth=1)


def test_more_gpus_are_used_if_they_help() -> None:
    found = choose(problem(workload(envs=64, minibatch_size=64), cluster(**GPUS, cpus=64), KNOWN))
    assert found.best.plan.runtime == "ray" and found.best.plan.rollout_workers == 4
    assert "not in process: at least" in found.explain()


def test_only_divisors_are_candidates() -> None:
    for plan in candidates(problem(LOAD, SMALL, KNOWN)):
        assert divides(plan, LOAD.envs, LOAD.batch_size)
    assert not divides(Plan(pipeline_depth=2), 7, 8)
    assert not divides(Plan("ray", rollout_workers=2), 24, 8), "calls of eight do not divide twelve"
    assert divides(Plan("ray", rollout_workers=2), 24, 16), "one call does for twelve"


def test_only_roles_with_work_are_tried() -> None:
    plain = list(candidates(problem(LOAD, SMALL, KNOWN)))
    assert not any(plan.reward_workers or plan.reference_workers for plan in plain)
    both = list(candidates(problem(replace(LOAD, rewarded=True, reference=True), SMALL, KNOWN)))
    assert any(plan.reward_workers for plan in both) and any(
        plan.reference_workers for plan in both
    )
    assert not any(plan.split == "head" for plan in both)
    separable = {"cpu": profile(bytes=replace(BYTES, features=1e3))}
    assert any(plan.split == "head" for plan in candidates(problem(LOAD, SMALL, separable)))


def test_memory_decides_micro_batch_and_off_loading() -> None:
    known = {
        "fast": replace(KNOWN["fast"], bytes=Bytes(weights=40e9, trained=1e9, activations=1e9))
    }
    wanted = problem(LOAD, cluster(**GPUS | {"gpus": 1}), known, micro_batch_size=32)
    found = choose(wanted)
    assert found.best.plan.micro_batch_size == 16, (
        "43 GB and 16 GB of activations fit into 72 GB, 32 GB do not"
    )
    on_ray = [each.plan for each in found.fitting if each.plan.runtime == "ray"]
    assert on_ray and all(plan.offload for plan in on_ray), "two copies of the weights do not fit"
    stale = choose(replace(wanted, graph=ppo(staleness=1, decoupled=True)))
    assert not any(each.plan.offload for each in stale.fitting), "rollouts run during updates"


def test_nothing_fits() -> None:
    known = {"fast": replace(KNOWN["fast"], bytes=Bytes(weights=400e9))}
    with pytest.raises(
        UserError,
        match=r"no plan fits cluster=made_up: 400\.0 GB wanted in a GPU of node, which has 80\.0 GB",
    ):
        choose(problem(LOAD, cluster(**GPUS), known, micro_batch_size=32))
    with pytest.raises(
        UserError, match=r"env\.num_envs=13 does not divide into groups for rollout\.batch_size=5"
    ):
        choose(problem(workload(envs=13, batch_size=5), SMALL, KNOWN, micro_batch_size=32))


@pytest.mark.parametrize(
    ("changed", "sharded"),
    [
        ({}, True),
        ({"device": "fake_gpu"}, False),
        ({"trainer_sharding": "full"}, True),
    ],
)
def test_the_trainer_is_sharded_if_no_plan_fits_otherwise(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], sharded: bool
) -> None:
    """Memory is not counted for fake GPUs, so that no plan is refused there."""

    def made_up(recipe: Recipe, model: Any) -> tuple[Problem, None]:
        def refuse(plan: Plan) -> None:
            if counted and recipe.cluster.trainer_sharding == "none":
                raise UserError("138 GB wanted")

        counted = recipe.cluster.device == "cuda"
        return replace(problem(LOAD, cluster(**GPUS), KNOWN), refuse=refuse), None

    monkeypatch.setattr(search, "plan_problem", made_up)
    given = replace(RECIPE, cluster=replace(RECIPE.cluster, **changed))
    recipe, _, choice, _ = search.planned_problem(given, None)
    assert (recipe.cluster.trainer_sharding == "full") == sharded
    assert choice.best.plan in [each.plan for each in choice.fitting]


def test_both_reasons_are_given_if_a_sharded_trainer_does_not_fit_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"fast": replace(KNOWN["fast"], bytes=Bytes(weights=400e9))}
    wanted = problem(LOAD, cluster(**GPUS), known, micro_batch_size=32)
    monkeypatch.setattr(search, "plan_problem", lambda recipe, model: (wanted, None))
    with pytest.raises(UserError, match=r"400\.0 GB wanted .*; sharded \(.*\): no plan fits"):
        search.planned_problem(RECIPE, None)
    alone = replace(wanted, cluster=cluster(**GPUS | {"gpus": 1}))
    monkeypatch.setattr(search, "plan_problem", lambda recipe, model: (alone, None))
    with pytest.raises(UserError) as error:
        search.planned_problem(RECIPE, None)
    assert "sharded" not in str(error.value), "there is no other GPU to hold a part"
    undivided = problem(workload(envs=13, batch_size=5), cluster(**GPUS), KNOWN)
    monkeypatch.setattr(search, "plan_problem", lambda recipe, model: (undivided, None))
    with pytest.raises(UserError) as error:
        search.planned_problem(RECIPE, None)
    assert "sharded" not in str(error.value), "memory is not what is missing"


def test_the_explanation_counts_compared_and_refused_plans() -> None:
    machines = Cluster(
        "mixed",
        (
            NodeConfig("big", gpus=1, gpu="fast", cpus=64),
            NodeConfig("spot", gpus=3, gpu="fast", cpus=64, spot=True),
        ),
    )
    found = choose(problem(LOAD, machines, KNOWN))
    lines = found.explain().splitlines()
    assert lines[0].startswith(f"{len(found.fitting)} plans fit, {len(found.refused)} do not")
    assert lines[1] == f"chosen: {found.best.plan}" and lines[2].strip() == found.best.bottleneck
    assert any("spot" in line for line in lines if line.startswith("refused: "))
    assert sum(line.startswith("not ") for line in lines) >= 2

"""The plan never changes the maths: three iterations end in the same weights on any placement and partition."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlinf_vla.config.cluster import MEASURED
from tests.runtime.ray.counting import (
    CLUSTER,
    GRPO_CONFIG,
    ITERATIONS,
    PPO_CONFIG,
    Recipe,
    in_process,
    iterate,
    on_ray,
    trained,
    with_staleness,
)

PLANS = {
    "in process, serial": (False, {}),
    "in process, pipelined": (False, {"depth": 2}),
    "ray, 1 rollout worker": (True, {}),
    "ray, 2 pipelined rollout workers": (True, {"rollout_workers": 2, "depth": 2}),
    "ray, 2 rollout workers, no streaming": (True, {"rollout_workers": 2, "streaming": False}),
    "ray, reference worker, taking turns": (True, {"reference_workers": 1, "offload": True}),
    "ray, split policy": (True, {"feature_workers": 1}),
    "ray, 2 trainer ranks": (True, {"ranks": 2}),
    "ray, 4 rollout workers, 2 trainer ranks": (True, {"rollout_workers": 4, "ranks": 2}),
    "ray, 2 trainer ranks, sharded, taking turns": (
        True,
        {"ranks": 2, "sharded": True, "offload": True},
    ),
    "ray, 2 rollout workers, 4 shards": (True, {"rollout_workers": 2, "shards_per_worker": 2}),
    "ray, reward worker": (True, {"reward_workers": 1}),
    "ray, collocated, taking turns": (
        True,
        {"placement": "collocated", "rollout_workers": 2, "ranks": 2, "offload": True},
    ),
    "ray, disaggregated": (
        True,
        {"placement": "disaggregated", "rollout_workers": 4, "ranks": 2, "reference_workers": 2},
    ),
    "ray, broadcast, sharded, split": (
        True,
        {
            "rollout_workers": 2,
            "feature_workers": 1,
            "ranks": 2,
            "sharded": True,
            "weights": "broadcast",
        },
    ),
    "ray, hybrid": (True, {"placement": "hybrid", "rollout_workers": 4, "ranks": 2, "depth": 2}),
}
RECIPES = {
    "ppo": Recipe(PPO_CONFIG),
    "ppo, adapters": Recipe(PPO_CONFIG, adapters=True),
    "grpo": Recipe(GRPO_CONFIG),
    "ppo, its own reward": Recipe(PPO_CONFIG, shaped=True),
    "grpo, its own reward": Recipe(GRPO_CONFIG, shaped=True),
    "ppo, stale by one": with_staleness(Recipe(PPO_CONFIG), 1),
    "grpo, stale by two": with_staleness(Recipe(GRPO_CONFIG), 2),
}


@cache
def expected(name: str) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    flow = in_process(RECIPES[name])
    metrics = iterate(flow, RECIPES[name])
    return trained(flow), metrics


TABLE = [("ppo", plan) for plan in PLANS if plan != "ray, reward worker"]
TABLE += [("ppo, adapters", "ray, split policy")]
TABLE += [
    ("ppo, its own reward", "ray, reward worker"),
    ("grpo, its own reward", "ray, reward worker"),
]
TABLE += [("grpo", plan) for plan in ("in process, pipelined", "ray, 2 pipelined rollout workers")]
TABLE += [
    ("ppo, stale by one", "ray, 2 pipelined rollout workers"),
    ("grpo, stale by two", "ray, 2 rollout workers, no streaming"),
]
"""Each line starts processes, so no line repeats what another one tests."""
IN_ANOTHER = (
    "disaggregated",
    "hybrid",
    "collocated, taking turns",
    "1 rollout worker",
    "2 pipelined rollout workers",
    "2 rollout workers, no streaming",
    "reference worker, taking turns",
    "split policy",
    "2 trainer ranks",
    "4 rollout workers, 2 trainer ranks",
)
AGAIN = [("ppo", f"ray, {plan}") for plan in IN_ANOTHER]
AGAIN += [
    ("ppo, its own reward", "ray, reward worker"),
    ("grpo", "ray, 2 pipelined rollout workers"),
    ("grpo, stale by two", "ray, 2 rollout workers, no streaming"),
    ("ppo, adapters", "ray, split policy"),
]
"""Rows whose settings are also in other rows, or that differ from one in a single setting."""
ALWAYS = "ray, 2 rollout workers, 4 shards"


def marks(recipe: str, plan: str) -> list[pytest.MarkDecorator]:
    if (recipe, plan) in AGAIN:
        return [pytest.mark.nightly]
    return [pytest.mark.slow] if PLANS[plan][0] and plan != ALWAYS else []


@pytest.mark.nightly
def test_a_slow_worker_takes_less(cluster: None, tmp_path: Path) -> None:
    subject = replace(
        RECIPES["ppo"], rollout_workers=2, shards_per_worker=2, one_slow=str(tmp_path / "slow")
    )
    with on_ray(subject) as flow:
        while flow.rollouts.size < 2:  # alone, the slow one would take all
            time.sleep(0.05)
        iterate(flow, subject)
        taken = Counter(
            span.track.partition(" policy")[0]
            for span in flow.timeline.spans()
            if span.track.endswith(" policy")
        )
        found = trained(flow)
    assert 3 * max(taken.values()) >= 2 * taken.total(), taken
    for name, value in expected("ppo")[0].items():
        assert torch.equal(found[name], value), name


@pytest.mark.nightly
def test_ranks_in_uneven_shares_learn_the_same(cluster: None) -> None:
    """The shares are those of a checkpoint; each update measures the ranks."""
    subject = replace(RECIPES["ppo"], ranks=2)
    with on_ray(subject, cluster=replace(CLUSTER, trainer_split=MEASURED)) as flow:
        flow.split.restore({"trainer_split": {"shares": [0.75, 0.25], "speeds": []}})
        iterate(flow, subject)
        found = trained(flow)
        speeds = flow.save()["trainer_split"]["speeds"]
    assert len(speeds) == ITERATIONS and all(sum(each) == pytest.approx(1) for each in speeds)
    for name, value in expected("ppo")[0].items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("recipe", "plan"), [pytest.param(*each, marks=marks(*each)) for each in TABLE]
)
def test_the_plan_never_changes_the_maths(recipe: str, plan: str, cluster: None) -> None:
    on_a_cluster, changes = PLANS[plan]
    subject = replace(RECIPES[recipe], **changes)
    if on_a_cluster:
        with on_ray(subject) as flow:
            metrics = iterate(flow, subject)
            found = trained(flow)
    else:
        local = in_process(subject)
        metrics = iterate(local, subject)
        found = trained(local)
    weights, known = expected(recipe)
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        if subject.ranks == 1:
            assert torch.equal(found[name], value), name
        else:  # sums over ranks have another order
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)
    for mine, theirs in zip(metrics, known, strict=True):
        same = {name for name in theirs if not name.startswith(("timing_s", "throughput"))}
        assert {name: mine[name] for name in same} == pytest.approx(
            {name: theirs[name] for name in same}, rel=1e-4, abs=1e-5, nan_ok=True
        )

"""``rlinf-vla bench throughput`` in counter world, under the plans that need no cluster; of the others, only the choice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlinf_vla.benchmarks import throughput as bench_throughput
from rlinf_vla.cli import compose
from rlinf_vla.config.cluster import IN_PROCESS
from rlinf_vla.runtime import recipes
from rlinf_vla.telemetry.timeline import Timeline
from tests.cli.conftest import CommandLine, Counting
from tests.features.planner.made_up import profile


def test_plans_are_measured_and_compared(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = bench_throughput.plans
    monkeypatch.setattr(
        bench_throughput,
        "plans",
        lambda recipe: {
            name: plan for name, plan in every(recipe).items() if plan.runtime == IN_PROCESS
        },
    )
    profile(chunk=2, episode_limit=6).write(tmp_path / "known.json")
    verb, *rest = counting.arguments("bench", "counting_ppo", "profile=known.json", "run_dir=bench")
    found = rlinf_vla(verb, "throughput", *rest)
    assert found.code == 0, found.err
    document = json.loads((tmp_path / "bench" / "bench_throughput.json").read_text())
    for name in (bench_throughput.SERIAL, bench_throughput.PIPELINED):
        measured = document[name]
        assert (
            0
            < measured["rollout_seconds"] + measured["update_seconds"]
            <= measured["seconds"] * 1.05
        )
        assert (
            measured["steps_per_s"] > 0
            and measured["samples_per_s"] > 0
            and measured["predicted_seconds"] > 0
        )
        assert (
            all(0 < share <= 1 for share in measured["busy"].values())
            and {"policy", "simulators", "trainer"} == measured["busy"].keys()
        )
    assert document["regret"] >= 1 and document["ratios"].keys() == {bench_throughput.PIPELINED}
    assert document[
        "rollout_bound"
    ] > 1 and "by the profile (the slower stage, or all cores)" in " ".join(found.out.split())


def test_the_plans_of_a_recipe() -> None:
    found = bench_throughput.plans(
        recipes.read(compose.load("train", ["recipe=maniskill_ppo", "cluster=laptop"]))
    )
    assert (
        list(found)[:2] == [bench_throughput.SERIAL, bench_throughput.PIPELINED] and len(found) == 6
    )
    assert [each.pipeline_depth for each in found.values()] == [1, 2] * 3
    assert [each.rollout_workers for each in found.values()] == [1, 1, 1, 1, 2, 2]


def test_utilisation_of_a_role_is_the_mean_of_its_tracks() -> None:
    timeline = Timeline()
    for track, end in (
        ("policy", 1.0),
        ("simulator 0", 2.0),
        ("simulator 1", 4.0),
        ("trainer", 0.5),
        ("rollout 1 policy", 3.0),
    ):
        timeline.add("work", track, 0.0, end)
    assert bench_throughput.busy(timeline) == {"policy": 2.0, "simulators": 3.0, "trainer": 0.5}

"""Comparison of a run with its prediction, in counter world."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlinf_vla.features.planner import monitor as plan_monitor
from rlinf_vla.features.planner.plan import Plan
from rlinf_vla.telemetry.metrics import read_metrics
from tests.cli.conftest import CommandLine, Counting
from tests.features.planner.made_up import profile

QUICK = ("run_dir=run", "episodes=2", "evaluation.before_and_after=false", "iterations=4")


@pytest.fixture
def known(tmp_path: Path) -> str:
    profile(chunk=2, episode_limit=6).write(tmp_path / "known.json")
    return f"profile={tmp_path / 'known.json'}"


def test_predicted_and_measured_times_are_printed(
    rlinf_vla: CommandLine, counting: Counting, known: str, tmp_path: Path
) -> None:
    found = rlinf_vla(*counting.arguments("train", "counting_ppo", known, *QUICK))
    assert found.code == 0, found.err
    assert re.search(r"predicted: \d+\.\d s per iteration; an iteration of .* waits for", found.out)
    assert re.search(r"an iteration took \d+\.\d s, \d+\.\d s were predicted", found.out)
    assert all(line["plan/predicted_s"] > 0 for line in read_metrics(tmp_path / "run"))


def test_a_run_without_a_prediction_prints_none(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path
) -> None:
    found = rlinf_vla(*counting.arguments("train", "counting_ppo", *QUICK))
    assert found.code == 0 and "predicted" not in found.out
    assert "plan/predicted_s" not in read_metrics(tmp_path / "run")[-1]


def test_a_change_of_plan_within_a_run_does_not_change_the_result(
    rlinf_vla: CommandLine,
    counting: Counting,
    known: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The new plan is given here, because which one is faster on this machine does not matter."""
    assert (
        rlinf_vla(*counting.arguments("train", "counting_ppo", *QUICK[1:], "run_dir=plain")).code
        == 0
    )

    asked: list[None] = []

    class Choosing(plan_monitor.PlanMonitor):
        def replan_if_due(self) -> None:
            asked.append(None)
            if len(asked) == 2:
                raise plan_monitor.Replanned(Plan(pipeline_depth=1, micro_batch_size=7))

    monkeypatch.setattr(plan_monitor, "PlanMonitor", Choosing)
    found = rlinf_vla(
        *counting.arguments("train", "counting_ppo", known, "cluster.replan_after=1", *QUICK)
    )
    assert found.code == 0, found.err
    assert (
        "another plan: resuming from" in found.out and "continuing after iteration 2" in found.out
    )
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]
    one, other = (read_metrics(tmp_path / name)[-1] for name in ("plain", "run"))
    for name in ("rollout/reward_mean", "critic/value_mean", "actor/entropy"):
        assert other[name] == pytest.approx(one[name], rel=1e-4)


def test_a_profile_is_refused_for_an_algorithm_with_one_plan(
    rlinf_vla: CommandLine, counting: Counting
) -> None:
    found = rlinf_vla(
        *counting.arguments("train", "counting_sac", "profile=known.json", "run_dir=run")
    )
    assert "profile is for on-policy algorithms: algorithm=sac is off-policy" in found.complaint

"""``rlinf-vla bench control`` as a user runs it: a few seconds, no simulator, and no check of speed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlinf_vla.benchmarks import control as bench_control
from rlinf_vla.benchmarks import served_control
from rlinf_vla.benchmarks.slow_link import Link
from rlinf_vla.config.robot import ControlConfig
from rlinf_vla.core import plugins
from rlinf_vla.models.remote.policy import RemotePolicy
from rlinf_vla.testing.toy_policy import LinearPolicy
from tests.cli.conftest import CommandLine, Counting
from tests.cli.counting_plugins import announce
from tests.skips import needs

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RATES": (20.0, 50.0),
        "TURNS": 1,
        "SECONDS": 1.0,
        "STALL_EVERY": 3,
    }.items():
        monkeypatch.setattr(bench_control, name, value)
    for name, value in {"LINKS": (Link(), Link(0.25)), "SECONDS": 1.0, "CONTROL_HZ": 20.0}.items():
        monkeypatch.setattr(served_control, name, value)


@pytest.mark.nightly
@needs("serve")
def test_the_policy_also_acts_from_a_server_over_each_link(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(tmp_path / "package")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [ROOT, tmp_path / "package"])))
    monkeypatch.setattr(plugins, "models", lambda: {"linear": LinearPolicy, "remote": RemotePolicy})
    monkeypatch.setattr(bench_control, "RATES", (10.0,))
    _, *rest = counting.arguments(
        "bench", "counting_ppo", "run_dir=bench", "control.max_observation_age_s=5"
    )
    found = rlinf_vla("bench", "control", *rest)
    assert found.code == 0, found.err
    assert "Policy on a server" in found.out and "round trip" in found.out
    rows = json.loads(Path("bench/bench_control.json").read_text())["served"]
    assert [(row["delay_s"], row["mode"]) for row in rows] == [
        (a, b) for a in (0.0, 0.25) for b in ("synchronous", "asynchronous")
    ]
    for row in rows:
        assert (
            row["ended"] == "finished"
            and row["steps"]["policy"] > 0
            and row["sections_ms"]["act"]["p50"] >= 1e3 * row["delay_s"]
        )
        assert row["ages_ms"]["action"]["p50"] >= 1e3 * row["delay_s"]
    assert all(row["missed"] > 0 for row in rows[2:]), (
        "a quarter of a second is more than chunks of two can hide"
    )


def test_modes_are_those_that_the_chunk_and_the_age_limit_allow() -> None:
    class Recipe:
        control = ControlConfig()

    class Chunks:
        spec = LinearPolicy(LinearPolicy.Config(chunk=1)).spec

    def names(chunk: int, **control: float) -> list[str]:
        Recipe.control = ControlConfig(**control)  # type: ignore[arg-type]
        Chunks.spec = LinearPolicy(LinearPolicy.Config(chunk=chunk)).spec
        return list(served_control.modes(Recipe, Chunks))  # type: ignore[arg-type]

    assert names(1) == ["synchronous"] and names(4) == ["synchronous", "asynchronous"]
    assert names(8, max_observation_age_s=0.2) == ["asynchronous"], (
        "at 20 Hz the last of 8 actions would be too old"
    )


@pytest.mark.slow
def test_both_loops_run_and_the_budget_is_reported(
    rlinf_vla: CommandLine, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_control, "without_server", lambda recipe: "not here")
    _, *rest = counting.arguments("bench", "counting_ppo", "run_dir=bench", "control.max_misses=1")
    found = rlinf_vla("bench", "control", *rest)
    assert found.code == 0, found.err
    assert counting.plugin.created == [], "no simulator is started"
    assert "not measured with the policy on a server: not here" in found.out
    assert "numbers: bench/bench_control.json" in found.out and "left for inference" in found.out
    document = json.loads(Path("bench/bench_control.json").read_text())
    assert [(each["loop"], each["control_hz"]) for each in document["loops"]] == [
        (a, b) for b in (20, 50) for a in ("ours", "sleep")
    ]
    assert all(0 < each["commands"] <= each["steps"] <= 1.5 for each in document["loops"])
    assert document["sleep_over_ours"].keys() == {"20 Hz", "50 Hz"} and document["chunk"] == 2
    for row in document["budgets"]:
        assert row["left"] == pytest.approx(row["period"] - row["overhead"]), (
            "chunks of two: each inference has a period"
        )
    assert (
        sum(document["control"]["20"]["steps"].values()) >= 20
        and document["control"]["20"]["warmup_ms"]
    )


def test_what_cannot_drive_a_robot_is_refused_in_one_line(
    rlinf_vla: CommandLine, counting: Counting
) -> None:
    _, *rest = counting.arguments("bench", "counting_ppo", "control.real_time_chunking=true")
    found = rlinf_vla("bench", "control", *rest)
    assert (
        found.code == 2
        and found.err.count("\n") == 1
        and "control.real_time_chunking=true" in found.err
    )
    _, *rest = counting.arguments(
        "bench", "counting_ppo", "control.reserve_ms=60", "control.asynchronous=false"
    )
    assert rlinf_vla("bench", "control", *rest).code == 2

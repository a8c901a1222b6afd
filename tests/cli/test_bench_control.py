"""``rlinf-vla bench control`` as a user runs it: a few seconds, no simulator, and no check of speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlinf_vla.benchmarks import control as bench_control
from tests.cli.conftest import CommandLine, Counting


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RATES": (20.0, 50.0), "TURNS": 1, "SECONDS": 1.0, "STALL_EVERY": 3}.items():
        monkeypatch.setattr(bench_control, name, value)


def test_both_loops_run_and_the_budget_is_reported(rlinf_vla: CommandLine, counting: Counting) -> None:
    _, *rest = counting.arguments("bench", "counting_ppo", "run_dir=bench", "control.max_misses=1")
    found = rlinf_vla("bench", "control", *rest)
    assert found.code == 0, found.err
    assert counting.plugin.created == [], "no simulator is started"
    assert "numbers: bench/bench_control.json" in found.out and "left for inference" in found.out
    document = json.loads(Path("bench/bench_control.json").read_text())
    assert [(each["loop"], each["control_hz"]) for each in document["loops"]] == [(a, b) for b in (20, 50) for a in ("ours", "sleep")]
    assert all(0 < each["commands"] <= each["steps"] <= 1.5 for each in document["loops"])
    assert document["sleep_over_ours"].keys() == {"20 Hz", "50 Hz"} and document["chunk"] == 2
    for row in document["budgets"]:
        assert row["left"] == pytest.approx(row["period"] - row["overhead"]), "chunks of two: each inference has a period"
    assert sum(document["control"]["20"]["steps"].values()) >= 20 and document["control"]["20"]["warmup_ms"]


def test_what_cannot_drive_a_robot_is_refused_in_one_line(rlinf_vla: CommandLine, counting: Counting) -> None:
    _, *rest = counting.arguments("bench", "counting_ppo", "control.real_time_chunking=true")
    found = rlinf_vla("bench", "control", *rest)
    assert found.code == 2 and found.err.count("\n") == 1 and "control.real_time_chunking=true" in found.err
    _, *rest = counting.arguments("bench", "counting_ppo", "control.reserve_ms=60", "control.asynchronous=false")
    assert rlinf_vla("bench", "control", *rest).code == 2

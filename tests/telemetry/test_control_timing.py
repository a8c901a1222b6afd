from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlinf_vla.features.realworld.loop_statistics import ACCEPTED, HELD, POLICY, LoopStatistics
from rlinf_vla.telemetry.control_timing import control_table, summary
from rlinf_vla.telemetry.report import write_report


@pytest.fixture
def document() -> dict[str, Any]:
    account = LoopStatistics(10.0)
    for count in range(1, 1001):
        account.took("act", count / 1e5)
        account.took("lidar", 0.001)
        account.age("action", 0.05)
        account.left(0.012)
    account.left(0.1)
    account.left(5.0)
    account.steps.update({POLICY: 1000, HELD: 3})
    account.chunks.update({ACCEPTED: 990, "too_old": 2})
    account.interventions.update(["max_velocity_m_s"] * 4)
    account.seconds = 100.3
    return json.loads(json.dumps(account.document()))


def test_quantiles_are_of_the_window(document: dict[str, Any]) -> None:
    act = document["sections_ms"]["act"]
    assert act["n"] == 1000
    assert [act[name] for name in ("p50", "p99", "p99.9", "max")] == pytest.approx(
        [5.005, 9.9001, 9.99001, 10.0]
    )
    assert (
        document["left_per_tenth"][1] == 1000
        and document["left_per_tenth"][10] == 1
        and document["left_per_tenth"][-1] == 1
    )


def test_one_line_summarises_the_steps(document: dict[str, Any]) -> None:
    expected = "10 Hz for 2 min, 3 deadlines missed, 1000 steps policy, 3 steps held, 2 chunks too old, 4 × max_velocity_m_s"
    assert summary(document) == expected


def test_the_table_has_every_section_known_or_not(document: dict[str, Any]) -> None:
    text = StringIO()
    Console(width=160, file=text).print(control_table(document))
    lines = text.getvalue().splitlines()
    (act,) = (line for line in lines if line.lstrip().startswith("act:"))
    assert [word for word in act.split() if word != "│"][-4:] == ["5.00", "9.90", "9.99", "10.00"]
    assert any("lidar" in line for line in lines) and any(
        "age of the observation" in line for line in lines
    )


def test_the_report_shows_it_if_there_is_one(document: dict[str, Any], tmp_path: Path) -> None:
    assert "Control loop" not in write_report(tmp_path).read_text()
    (tmp_path / "control.json").write_text(json.dumps(document))
    page = write_report(tmp_path).read_text()
    assert "Control loop" in page and "3 deadlines missed" in page and "When commands left" in page
    (tmp_path / "control.json").write_text('{"control_hz": 10}')
    assert "control.json could not be read" in write_report(tmp_path).read_text()

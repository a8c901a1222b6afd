from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_vla.benchmarks import robot_safety


def test_the_benchmark_writes_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "safety.md"
    monkeypatch.setattr(robot_safety, "TRIAL", 60)
    monkeypatch.setattr("sys.argv", ["robot_safety", str(page), "--actions", "120"])
    monkeypatch.setattr(robot_safety, "latency", lambda cell: {"all": [1.0, 2.0, 0.5]})
    robot_safety.main()
    text = page.read_text(encoding="utf-8")
    assert "\n120 of 120 actions" in text and "Faults: none" in text
    assert "| max_jerk_m_s3 | 0." in text and "| all | 1 | 2 | 0 |" in text

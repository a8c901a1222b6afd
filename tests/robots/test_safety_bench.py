from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_vla.robots import safety_bench


def test_the_bench_writes_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "safety.md"
    monkeypatch.setattr(safety_bench, "TRIAL", 60)
    monkeypatch.setattr("sys.argv", ["safety_bench", str(page), "--actions", "120"])
    monkeypatch.setattr(safety_bench, "latency", lambda cell: {"all": [1.0, 2.0, 0.5]})
    safety_bench.main()
    text = page.read_text(encoding="utf-8")
    assert "\n120 of 120 actions" in text and "Faults: none" in text
    assert "| max_jerk_m_s3 | 0." in text and "| all | 1 | 2 | 0 |" in text

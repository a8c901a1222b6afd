"""``rlinf-vla bench soak`` on counter world, and on one that leaks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf_vla.benchmarks import soak as bench_soak
from rlinf_vla.benchmarks.soak import Sample, SoakResult
from rlinf_vla.telemetry.measurement import Usage
from tests.cli.conftest import CommandLine, Counting


@pytest.mark.parametrize(("rate", "code"), [(0.0, 0), (1e8, 1)])
def test_memory_growth_is_detected(
    rlinf_vla: CommandLine,
    counting: Counting,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    rate: float,
    code: int,
) -> None:
    """In a process that holds 1 GB, and ``rate`` bytes more each second, by a clock that advances 10 ms at each reading."""
    ticks = itertools.count()

    def seconds() -> float:
        return next(ticks) / 100

    monkeypatch.setattr(bench_soak, "time", SimpleNamespace(monotonic=seconds))
    monkeypatch.setattr(bench_soak, "resident", lambda field: int(1e9 + rate * seconds()))
    monkeypatch.setattr(bench_soak, "usage", lambda: Usage(0, 0.0, 0))
    found = rlinf_vla("bench", "soak", "env=counter", "seconds=4", "page=soak.md", "run_dir=out")
    assert found.code == code, found.out + found.err
    document = json.loads((tmp_path / "out" / "bench_soak.json").read_text())["counter"]
    assert document["episodes"] > 5 and document["steps"] >= document["episodes"]
    assert len(document["samples"]) > 5 and (document["growth"] >= 0.02) == bool(code)
    first = (tmp_path / "soak.md").read_text()
    assert first.startswith("# Memory over time") and first.count("| counter (") == 1
    rlinf_vla("bench", "soak", "env=counter", "seconds=3", "page=soak.md", "run_dir=again")
    assert (tmp_path / "soak.md").read_text().startswith(first), "a line is added"


def test_warm_up_and_a_single_peak_do_not_count() -> None:
    held = [1, 50, *[100] * 10]
    held[7] = 300
    soaked = SoakResult(
        12.0, 1, 1, [Sample(float(second), memory) for second, memory in enumerate(held)]
    )
    assert soaked.growth == 0
    rising = SoakResult(12.0, 1, 1, [Sample(float(second), 100 + second) for second in range(12)])
    assert rising.levels == (102.5, 110.5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["env=counter", "seconds=soon"], "seconds=soon must be"), ([], "which simulators")],
)
def test_bad_lines(
    rlinf_vla: CommandLine, counting: Counting, arguments: list[str], words: str
) -> None:
    found = rlinf_vla("bench", "soak", *arguments)
    assert found.code == 2 and words in found.err and len(found.err.splitlines()) == 1

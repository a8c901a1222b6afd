from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlinf_vla.benchmarks import load as bench_load
from tests.cli.conftest import CommandLine


def test_time_and_memory_of_loading_are_reported(
    rlinf_vla: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the tiny model and in this process: the numbers are meaningless, but the steps are the same."""
    shards: list[Path] = []

    def in_process(stage: str, folder: str, chosen: dict[str, Any]) -> dict[str, Any]:
        if stage == "make":
            bench_load.make(Path(folder), chosen)
            shards.extend(Path(folder).glob("*.safetensors"))
            return {}
        return bench_load.load(Path(folder), chosen)

    monkeypatch.setattr(bench_load, "in_process", in_process)
    found = rlinf_vla("bench", "load", "model.checkpoint=asset://openvla_tiny")
    assert found.code == 0, found.err
    assert len(shards) == bench_load.SHARDS and not any(path.exists() for path in shards), (
        "the temporary checkpoint is gone"
    )
    above, whole = (
        float(number) for number in re.findall(r"memory / checkpoint: ([\d.]+)", found.out)
    )
    assert 0 <= above < whole and "seconds to load" in found.out


def test_a_failed_measurement_names_the_reason(
    rlinf_vla: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "model.sizes is not a key" in rlinf_vla("bench", "load", "+model.sizes=7").complaint
    monkeypatch.setattr(bench_load.sys, "executable", "/bin/false")
    assert "could not make the checkpoint" in rlinf_vla("bench", "load").complaint

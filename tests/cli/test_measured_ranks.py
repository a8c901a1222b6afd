"""On-policy training on trainer ranks whose rows follow their measured speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import CommandLine, Counting
from tests.cli.counting_plugins import announce
from tests.cli.test_learner_ranks import ROOT, ended, start

MEASURED = ("cluster.runtime=ray", "cluster.trainer_ranks=2", "cluster.trainer_split=measured")


def split_of(run: Path, iteration: int) -> dict[str, Any]:
    (found,) = (run / "checkpoints").glob(f"*{iteration}/state.json")
    state: dict[str, Any] = json.loads(found.read_text())["trainer_split"]
    return state


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_resumed_run_keeps_what_was_measured(
    counting: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(tmp_path / "package")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'package'}:{ROOT}")
    quick = ("iterations=1", "evaluation.before_and_after=false", "run_dir=run")
    ended(start(counting.arguments("train", "counting_ppo", *MEASURED, *quick), tmp_path))
    before = split_of(tmp_path / "run", 1)
    assert len(before["speeds"]) == 1 and before["shares"] == []
    ended(start(["train", "run=run", "iterations=2"], tmp_path))
    after = split_of(tmp_path / "run", 2)
    assert len(after["speeds"]) == 2 and after["speeds"][0] == before["speeds"][0]


def test_sharded_ranks_are_divided_evenly(rlinf_vla: CommandLine, counting: Counting) -> None:
    told = rlinf_vla(
        *counting.arguments("train", "counting_ppo", *MEASURED, "cluster.trainer_sharding=full")
    ).complaint
    assert told.startswith("cluster.trainer_split=measured: ranks of cluster.trainer_sharding=full")

"""``tracker=`` as ``train`` uses it: refused before a run begins, or told what the run logs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlinf_vla.telemetry import metrics
from rlinf_vla.telemetry.metrics import read_metrics
from tests.cli.conftest import CommandLine, Counting


def test_a_library_that_is_missing_is_refused_before_the_run(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "find_spec", lambda module: None)
    found = rlinf_vla(*counting.arguments("train", "counting_ppo", "tracker=[tensorboard,mlflow]"))
    assert (
        "tracker=mlflow is not installed: pip install mlflow-skinny" in found.complaint
        and list(tmp_path.iterdir()) == []
    )
    assert (
        "tracker[0]=tensorbord is not known"
        in rlinf_vla(*counting.arguments("train", "counting_ppo", "tracker=[tensorbord]")).complaint
    )


def test_a_tracker_gets_the_metrics_the_recipe_and_the_last_evaluation(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, dict[str, float]]] = []
    recipes: list[dict[str, Any]] = []

    class Recorder:
        identity = "known"

        def __init__(self, run_dir: Path, recipe: Mapping[str, Any], identity: str) -> None:
            recipes.append(dict(recipe))

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            sent.append((step, dict(metrics)))

        def finish(self, failed: bool) -> None:
            assert not failed

    monkeypatch.setitem(metrics.OPENED, "wandb", Recorder)
    monkeypatch.setattr(metrics, "find_spec", lambda module: object())
    found = rlinf_vla(
        *counting.arguments("train", "counting_ppo", "run_dir=run", "tracker=[wandb]")
    )
    assert found.code == 0, found.out + found.err
    logged = [(line.pop("step"), line) for line in read_metrics(tmp_path / "run")]
    assert [(step, set(metrics)) for step, metrics in sent] == [
        (step, set(line) - {"time"}) for step, line in logged
    ]
    last = sent[-1][1]
    assert (
        0
        <= last["eval/success_once_low"]
        <= last["eval/success_once"]
        <= last["eval/success_once_high"]
        <= 1
    )
    assert recipes[0]["algorithm"]["name"] == "ppo" and recipes[0]["tracker"] == ["wandb"]
    assert not (tmp_path / "run" / "tensorboard").exists()
    found = rlinf_vla(
        *counting.arguments(
            "train", "counting_ppo", "run_dir=run", "resume=auto", "iterations=3", "tracker=[wandb]"
        )
    )
    assert found.code == 0 and [
        step for step, metrics in sent if "timing_s/iteration" in metrics
    ] == [1, 2, 3], found.err

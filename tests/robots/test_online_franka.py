"""A session of a few episodes at the simulated Franka, with the code of a real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlinf_vla.cli import main as cli
from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.telemetry.metrics import read_metrics
from tests.cli.conftest import handlers_of_a_module  # noqa: F401
from tests.skips import needs

pytestmark = [
    pytest.mark.machine,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    needs("franka"),
]

LENIENT = (
    *(
        "robot.max_age_s=2",
        "robot.frozen_s=5",
        "control.max_observation_age_s=3",
        "control.max_misses=100",
    ),
    *("cluster=laptop", "session.learner_nice=0", "env.episode_limit=200"),
)
"""On a busy machine the simulated second is longer."""


def test_two_demonstrations_an_iteration_and_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cell = f"robot.folder={tmp_path}/cell"
    assert (
        cli.run(
            [
                "robot",
                "record",
                "recipe=franka_rlpd",
                cell,
                "output=data",
                "algorithm.demonstrations=2",
                "record.video=false",
                *LENIENT,
            ]
        )
        == 0
    )
    assert len(LeRobotReader(tmp_path / "data")) == 2
    front = json.loads((tmp_path / "data" / "meta" / "info.json").read_text())["cameras"][
        "observation.images.front"
    ]
    assert front["intrinsics"]["width"] == 64 and front["mount"]["parent"] == "base"
    small = (
        "iterations=2",
        "episodes=1",
        "algorithm.episodes=1",
        "algorithm.batch_size=16",
        "algorithm.updates_per_step=0.05",
    )
    shown = ("algorithm.demonstrations=0", "algorithm.dataset=data")
    assert (
        cli.run(["train", "recipe=franka_rlpd", cell, "run_dir=run", *small, *shown, *LENIENT]) == 0
    )
    steps = [
        line["rollout/steps"] for line in read_metrics(tmp_path / "run") if "rollout/steps" in line
    ]
    assert len(steps) == 2 and min(steps) > 0
    control = json.loads((tmp_path / "run" / "control.json").read_text())
    assert control["steps"]["policy"] > 0 and control["sections_ms"]["act"]["n"] > 0
    assert (tmp_path / "run" / "report.html").exists() and list(
        (tmp_path / "run" / "videos").glob("*.mp4")
    )

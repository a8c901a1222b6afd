"""HG-DAgger at the simulated arm from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import needs

pytestmark = [needs("franka"), pytest.mark.simulator, pytest.mark.realtime]


@pytest.mark.nightly
def test_the_session_ends_after_its_minutes(tmp_path: Path) -> None:
    """The scene's expert takes over, the policy imitates it, and no second iteration begins."""
    run = tmp_path / "run"
    keys = (
        "iterations=100",
        "session.minutes=0.001",
        "session.patience_s=0.2",
        "session.learner_nice=0",
        "env.episode_limit=10",
    )
    small = (
        "algorithm.episodes=1",
        "algorithm.updates=2",
        "algorithm.batch_size=4",
        "evaluation.before_and_after=false",
    )
    command = (
        sys.executable,
        "-m",
        "rlinf_vla.cli.main",
        "train",
        "recipe=franka_dagger",
        "model.checkpoint=asset://pi0_tiny_franka",
    )
    command += ("model.options.random_weights=true",)
    done = subprocess.run(
        [*command, *keys, *small, f"run_dir={run}", f"robot.folder={tmp_path / 'arm'}"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics["rollout/human_share"] > 0 and metrics["actor/updates"] == 2
    assert [each.name for each in (run / "checkpoints").iterdir()] == ["step_000001"]

"""The policy's process is killed ten times while the arm moves. The arm's process is the real one; its arm obeys at once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from franka_session import is_driven, journal, wait_until
from obedient import CELL

from rlinf_vla.robots.runtime_folder import JOURNAL

HERE = Path(__file__).parent
GONE = "policy: its process is gone"
ROUNDS = 10
START_S = 60.0
PATIENCE = 8
"""Times what is stated: cores are shared with other tests."""


def moves(truth: Path) -> list[float]:
    """When the tool was told to be elsewhere than a tick before."""
    lines = truth.read_text().splitlines()[:-1] if truth.exists() else []
    found = np.array([line.split() for line in lines], np.float64).reshape(-1, 4)
    return found[1:, 0][np.linalg.norm(np.diff(found[:, 1:], axis=0), axis=1) > 1e-6].tolist()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_arm_stands_each_time_and_waits_for_an_acknowledgement(tmp_path: Path) -> None:
    python = tmp_path / "python"
    truth = tmp_path / "truth"
    delay = random.Random(0)
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="{HERE}:$PYTHONPATH" exec {sys.executable} {HERE / "obedient_process.py"} "$@"\n'
    )
    python.chmod(0o700)
    (tmp_path / JOURNAL).touch()
    stated = CELL.stop_time_s + 2 / CELL.servo_hz
    for number in range(ROUNDS):
        truth.unlink(missing_ok=True)
        before = len(journal(tmp_path))
        driver = subprocess.Popen(
            [sys.executable, HERE / "driving.py", tmp_path, python],
            env={**os.environ, "OBEDIENT_TRUTH": str(truth)},
        )
        try:
            wait_until(lambda: len(moves(truth)) > 10, START_S, "the arm moves")
            time.sleep(delay.uniform(0.0, 0.2))
        finally:
            driver.kill()
            killed = time.monotonic()
            driver.wait()
        wait_until(lambda: not is_driven(tmp_path), START_S, "the arm's process ends")
        events = [
            (each["event"], each["fault"]) for each in journal(tmp_path)[before:] if "fault" in each
        ]
        found = [("fault found at the start", GONE), ("acknowledged", GONE)] if number else []
        assert events == [*found, ("fault", GONE), ("end", GONE)]
        assert moves(truth)[-1] - killed < PATIENCE * stated

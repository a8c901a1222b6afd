"""The main job on real ManiSkill and real Ray: the same bits as in one process, and again after its trainer was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlinf_vla.telemetry.metrics import read_metrics
from tests.commands.test_train import SMALL, assert_same_bits, train, weights

pytestmark = pytest.mark.simulator


def trainer_of(driver: int) -> int | None:
    """The process of the trainer that a run's own cluster has started; Ray names its processes after what they are."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_text()
            if line.startswith("ray::TrainerWorker") and descends(int(path.name), driver):
                return int(path.name)
        except OSError:
            continue
    return None


def descends(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


@pytest.mark.timeout(600)
def test_the_same_bits_on_ray_though_its_trainer_is_killed(tmp_path: Path) -> None:
    assert train(tmp_path / "here") == 0
    there = tmp_path / "there"
    on_ray = ("cluster.runtime=ray", "cluster.rollout_workers=2", "rollout.pipeline_depth=1", "env.processes=1")  # calls shaped as here
    command = [sys.executable, "-m", "rlinf_vla.cli", *SMALL, *on_ray, f"run_dir={there}"]
    with (tmp_path / "log").open("w") as log:  # Ray's processes would keep a pipe open
        driver = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while driver.poll() is None and not (there / "checkpoints" / "step_000001" / "COMPLETE").exists():
                time.sleep(0.05)
            victim = trainer_of(driver.pid)
            if victim is not None:
                os.kill(victim, signal.SIGKILL)
            assert driver.wait(timeout=400) == 0, (tmp_path / "log").read_text()
        finally:
            driver.kill()
    said = (tmp_path / "log").read_text()
    assert victim is None or "trainer 0 was lost" in said, said
    assert [line["step"] for line in read_metrics(there)] == [1, 2, 3]
    assert_same_bits(weights(tmp_path / "here"), weights(there))

"""No command runs code from the current directory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Counting
from tests.cli.counting_plugins import announce

ROOT = Path(__file__).parents[2]
POISONED = (
    *(
        "json",
        "pickle",
        "socket",
        "struct",
        "select",
        "runpy",
        "traceback",
        "dataclasses",
        "signal",
        "typing",
        "multiprocessing",
    ),
    *("numpy", "torch", "yaml", "hydra", "omegaconf", "safetensors", "rlinf_vla", "sitecustomize"),
)

Run = Callable[..., str]


@pytest.fixture
def poisoned(counting: Counting, tmp_path: Path) -> Run:
    """Runs a command line as the installed program does, in a folder with modules that leave a file when they are imported."""
    announce(tmp_path / "package")
    here = tmp_path / "here"
    here.mkdir()
    for name in POISONED:
        (here / f"{name}.py").write_text(
            f"open({str(tmp_path / 'marks')!r}, 'a').write({name!r} + ' ')\n"
        )
    program = tmp_path / "bin" / "rlinf-vla"
    program.parent.mkdir()
    program.write_text("from rlinf_vla.cli.main import main\nmain()\n")
    removed = ("PYTHONSAFEPATH", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    environment |= {
        "PYTHONPATH": f"{tmp_path / 'package'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, str(program), *arguments],
            cwd=here,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        marks = tmp_path / "marks"
        assert not marks.exists(), f"imported from the current directory: {marks.read_text()}"
        return done.stdout

    return run


@pytest.mark.slow
def test_training_with_simulator_processes(poisoned: Run, counting: Counting) -> None:
    said = poisoned(
        *counting.arguments(
            "train", "counting_ppo", "env=counter_processes", "iterations=1", "run_dir=run"
        )
    )
    assert "report" in said


@pytest.mark.nightly
def test_a_sweep_in_processes_and_verify(poisoned: Run, counting: Counting) -> None:
    work = (
        "env=counter_processes",
        "sweep.policies=[start,random]",
        "episodes=2",
        "sweep.parallel=2",
        "evaluation.filmed=0",
    )
    poisoned(*counting.arguments("eval", "counting_ppo", *work, "run_dir=out"))
    assert "agrees" in poisoned("verify", "out/result.json", "--episodes", "2")


@pytest.mark.nightly
def test_workers_on_ray(poisoned: Run, counting: Counting) -> None:
    work = (
        "env=counter_processes",
        "iterations=1",
        "run_dir=run",
        "evaluation.before_and_after=false",
        "cluster.runtime=ray",
    )
    poisoned(*counting.arguments("train", "counting_ppo", *work))

"""A minimal main job on real ManiSkill: a run that is killed, resumed or pipelined gives bit-identical weights."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlinf_vla.cli import main as cli
from rlinf_vla.envs.vector_env import ProcessVectorEnv
from rlinf_vla.telemetry.metrics import read_metrics
from tests.cli.own_signal import SECOND_ITERATION, STOP_ITSELF, kill_rank, when_it_prints
from tests.cli.runs import assert_same_files

pytestmark = pytest.mark.simulator

SMALL = [
    "train",
    "recipe=maniskill_ppo",
    "cluster=laptop",
    "model.checkpoint=asset://openvla_tiny",
    "model.options.random_weights=true",
    "iterations=3",
    "env.num_envs=4",
    "env.episode_limit=5",
    "env.reward=normalized_dense",
    "algorithm.horizon=10",
    "algorithm.minibatch_size=20",
    "algorithm.value_warmup=1",
    "rollout.batch_size=2",
    "evaluation.before_and_after=false",
    "checkpoints.every=1",
    "cluster.update_threads=1",
    "rollout.pipeline_depth=1",
    "env.processes=1",
]


def train(run_dir: Path, *overrides: str) -> int:
    return cli.run([*SMALL, f"run_dir={run_dir}", *overrides])


def weights(run_dir: Path, step: int = 3) -> dict[str, torch.Tensor]:
    checkpoint = run_dir / "checkpoints" / f"step_{step:06d}"
    return load_file(checkpoint / "adapter" / "adapter_model.safetensors") | load_file(
        checkpoint / "heads.safetensors"
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("train") / "undisturbed"
    assert train(run_dir) == 0
    return run_dir


def test_the_run_directory_is_complete(undisturbed: Path) -> None:
    names = {path.relative_to(undisturbed).parts[0] for path in undisturbed.rglob("*")}
    assert {
        "recipe.yaml",
        "environment.json",
        "metrics.jsonl",
        "tensorboard",
        "timeline.json",
        "report.html",
        "checkpoints",
    } <= names
    metrics = read_metrics(undisturbed)
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert {
        "actor/approx_kl",
        "critic/explained_variance",
        "timing_s/rollout",
        "throughput/steps_per_s",
    } <= metrics[-1].keys()
    first, last = weights(undisturbed, 1), weights(undisturbed, 3)
    adapter = [name for name in last if "lora_B" in name]
    assert adapter and all(torch.count_nonzero(first[name]) == 0 for name in adapter), (
        "the first iteration trains only the critic"
    )
    assert any(not torch.equal(first[name], last[name]) for name in adapter)


@pytest.mark.slow
def test_two_groups_with_a_killed_simulator_train_the_same_weights_as_one(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it simulates a step of the second iteration."""
    step_async = ProcessVectorEnv.step_async
    steps = itertools.count(1)
    killed = list[int]()

    def killing(env: ProcessVectorEnv, *arguments: Any, **options: Any) -> None:
        step_async(env, *arguments, **options)
        if next(steps) == 27:
            assert (tmp_path / "disturbed" / "metrics.jsonl").exists()
            killed.append(simulators_of(os.getpid())[0])
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(ProcessVectorEnv, "step_async", killing)
    assert train(tmp_path / "disturbed", "rollout.pipeline_depth=2", "env.processes=2") == 0
    assert killed
    assert_same_files(tmp_path / "disturbed", undisturbed, 3)


@pytest.mark.slow
def test_a_killed_run_resumes(undisturbed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "stopped"
    kill_at_the_second_iteration(run_dir, tmp_path)
    assert train(run_dir, "resume=auto") == 0
    assert [line["step"] for line in read_metrics(run_dir)] == [1, 2, 3]
    assert_same_files(run_dir, undisturbed, 3)


def kill_at_the_second_iteration(run_dir: Path, package: Path) -> None:
    """Trains in a separate process until its second iteration; its simulators end with it."""
    command = [
        sys.executable,
        "-m",
        "rlinf_vla.cli.main",
        *SMALL,
        f"run_dir={run_dir}",
        "resume=auto",
    ]
    log = run_dir.with_suffix(".log")
    with log.open("w") as file, when_it_prints(SECOND_ITERATION, package, STOP_ITSELF):
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=with_package(package)
        )
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        simulators = simulators_of(process.pid)
        process.kill()
        assert process.wait(timeout=60) == -signal.SIGKILL, log.read_text()
    assert [each.name for each in (run_dir / "checkpoints").iterdir()] == ["step_000001"]
    assert len(simulators) == 1
    wait_for(lambda: not any(Path("/proc", str(pid)).exists() for pid in simulators))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_same_bits_on_ray_although_its_trainer_is_killed(
    undisturbed: Path, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    on_ray = ("cluster.runtime=ray", "cluster.rollout_workers=2")
    command = [sys.executable, "-m", "rlinf_vla.cli.main", *SMALL, *on_ray, f"run_dir={there}"]
    # Ray's processes would keep a pipe open
    with (
        (tmp_path / "log").open("w") as log,
        when_it_prints(SECOND_ITERATION, tmp_path, kill_rank(there, 0)),
    ):
        driver = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=with_package(tmp_path)
        )
        try:
            assert driver.wait(timeout=400) == 0, (tmp_path / "log").read_text()
        finally:
            driver.kill()
    said = (tmp_path / "log").read_text()
    assert "trainer 0 was lost" in said, said
    assert [line["step"] for line in read_metrics(there)] == [1, 2, 3]
    assert_same_files(there, undisturbed, 3)


def with_package(folder: Path) -> dict[str, str]:
    """Environment variables of a process that imports from the folder, too."""
    return os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ['PYTHONPATH']}"}


def test_a_finished_run_is_not_trained_again(
    undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (undisturbed / "metrics.jsonl").read_bytes()
    assert train(undisturbed) == 2
    assert "resume=auto" in capsys.readouterr().err
    assert (undisturbed / "metrics.jsonl").read_bytes() == before


def test_evaluation_of_a_checkpoint(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = undisturbed / "checkpoints" / "step_000003"
    overrides = [each for each in SMALL[1:] if not each.startswith("evaluation")]
    arguments = [
        "eval",
        *overrides,
        f"checkpoint={checkpoint}",
        "episodes=5",
        "evaluation.filmed=1",
        f"run_dir={tmp_path}",
    ]
    arguments += ["env.processes=1", "rollout.pipeline_depth=1"]  # simulators take seconds to start
    assert cli.run(arguments) == 0
    document = json.loads((tmp_path / "evaluation" / "step_000003.json").read_text())
    for mode in ("sampled", "greedy"):
        assert document[mode]["n_episodes"] == 5
        assert [episode["seed"] for episode in document[mode]["episodes"]] == [0, 1, 2, 3, 4]
        assert len(document[mode]["pc_success_ci95"]) == 2
    assert len(list((tmp_path / "videos").glob("step_000003_*.mp4"))) == 1
    assert "in 5 episodes" in capsys.readouterr().out


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def simulators_of(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, status = (path / "cmdline").read_text(), (path / "status").read_text()
        except OSError:
            continue
        if "rlinf_vla.envs.maniskill.simulator" in command and f"PPid:\t{parent}\n" in status:
            found.append(int(path.name))
    return found

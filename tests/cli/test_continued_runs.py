"""What a run that is continued keeps, reports and refuses, and what the jobs of --multirun do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from rlinf_vla.cli import jobs
from rlinf_vla.config.errors import Failure, UserError
from tests.cli.conftest import CommandLine, Counting

QUICK = (
    "run_dir=run",
    "checkpoints.every=1",
    "evaluation.filmed=0",
    "episodes=2",
    "rollout.pipeline_depth=1",
)


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the report of a run takes most of the time of a command."""
    monkeypatch.setattr("rlinf_vla.telemetry.report.write_report", lambda directory: directory)


def document(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_an_earlier_evaluation_is_kept_and_other_episodes_are_played(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path
) -> None:
    evaluation, videos = tmp_path / "run" / "evaluation", tmp_path / "run" / "videos"
    assert rlinf_vla(*counting.arguments("train", "counting_ppo", *QUICK, "iterations=1")).code == 0
    first = document(evaluation / "after.json")
    videos.mkdir()
    (videos / "after_Low_1.mp4").touch()
    assert rlinf_vla("train", "run=run", "iterations=2").code == 0
    assert (
        document(evaluation / "step_000001.json") == first
        and document(evaluation / "after.json")["policy_version"] == 2
    )
    assert [path.name for path in videos.iterdir()] == ["step_000001_Low_1.mp4"]
    assert rlinf_vla("train", "run=run", "episodes=4").code == 0
    again = document(evaluation / "after.json")
    assert (
        again["policy_version"] == 2
        and len(again["sampled" if "sampled" in again else "greedy"]["episodes"]) == 4
    )
    stamp = (evaluation / "after.json").stat().st_mtime_ns
    assert rlinf_vla("train", "run=run").code == 0
    assert (evaluation / "after.json").stat().st_mtime_ns == stamp, "nothing is left to do"


def test_what_a_run_began_with_is_kept(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path
) -> None:
    quick = (*QUICK, "evaluation.before_and_after=false")
    assert rlinf_vla(*counting.arguments("train", "counting_ppo", *quick, "iterations=1")).code == 0
    path = tmp_path / "run" / "environment.json"
    began = document(path)
    path.write_text(json.dumps(began | {"packages": began["packages"] | {"torch": "1.0"}}))
    told = rlinf_vla("train", "run=run", "iterations=2")
    assert (
        f"this run continues with other software: packages.torch was 1.0, is {began['packages']['torch']}"
        in told.out
    )
    assert document(path)["argv"] == began["argv"] and document(path)["packages"]["torch"] == "1.0"
    assert "other software" not in rlinf_vla("train", "run=run", "iterations=3").out, (
        "compared with the process before"
    )
    assert [each["argv"][1:2] for each in document(path)["continued"]] == [["run=run"], ["run=run"]]
    path.write_text("{")
    assert "environment.json was damaged" in rlinf_vla("train", "run=run", "iterations=4").out


def test_a_schedule_that_ends_with_the_run_has_its_length(
    rlinf_vla: CommandLine, counting: Counting
) -> None:
    quick = (
        *QUICK,
        "evaluation.before_and_after=false",
        "algorithm.demonstrations.episodes=4",
        "iterations=2",
    )
    assert rlinf_vla(*counting.arguments("train", "counting_sft", *quick)).code == 0
    told = rlinf_vla("train", "run=run", "iterations=4").complaint
    assert "learning rate falls until the last iteration" in told and "iterations was 2" in told
    fixed = [word.replace("run_dir=run", "run_dir=fixed") for word in quick]
    assert (
        rlinf_vla(
            *counting.arguments("train", "counting_sft", *fixed, "algorithm.decay_steps=4")
        ).code
        == 0
    )
    assert rlinf_vla("train", "run=fixed", "iterations=4").code == 0


@pytest.mark.parametrize("key", ["learning_rate_end=0.5", "entropy_coef_end=0.0"])
def test_a_coefficient_that_changes_until_the_end_keeps_the_runs_length(
    rlinf_vla: CommandLine, counting: Counting, key: str
) -> None:
    words = (*QUICK, "evaluation.before_and_after=false", f"algorithm.{key}", "iterations=1")
    assert rlinf_vla(*counting.arguments("train", "counting_ppo", *words)).code == 0
    told = rlinf_vla("train", "run=run", "iterations=2").complaint
    reason = f"resume (algorithm.{key}: it is reached in the last iteration): iterations was 1 in "
    assert told.startswith(reason)


def test_addresses_of_a_cluster_that_is_not_used(
    rlinf_vla: CommandLine, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = rlinf_vla(
        *counting.arguments("train", "counting_ppo", "cluster.address=10.0.0.1:6379")
    ).complaint
    assert (
        told == "cluster.address=10.0.0.1:6379 needs cluster.runtime=ray: leave it out, or set both"
    )
    monkeypatch.setenv("RAY_ADDRESS", "10.99.99.99:6379")
    told = rlinf_vla(*counting.arguments("train", "counting_ppo", "cluster.runtime=ray")).complaint
    assert "RAY_ADDRESS=10.99.99.99:6379 is not read: set cluster.address=10.99.99.99:6379" in told


def test_a_folder_whose_name_is_too_long_for_ray(
    rlinf_vla: CommandLine, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/scratch/slurm_jobdir/1355700/" + "t" * 10)
    told = rlinf_vla(*counting.arguments("train", "counting_ppo", "cluster.runtime=ray")).complaint
    assert "has 40 characters, for Ray's sockets at most 39: set RAY_TMPDIR=/tmp" in told


def test_no_job_starts_if_one_cannot_run(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path
) -> None:
    told = rlinf_vla(
        *counting.arguments(
            "train", "counting_grpo", "-m", "algorithm.group_size=4,7", "algorithm.episodes=8"
        )
    ).complaint
    assert told.startswith(
        "job 2 of 2: algorithm.episodes=8 is not a multiple of algorithm.group_size=7"
    )
    told = rlinf_vla(
        *counting.arguments("train", "counting_ppo", "-m", "seed=1,2", "run_dir=same")
    ).complaint
    assert told.startswith("run_dir=same is that of several jobs")
    assert not (tmp_path / "same").exists() and not (tmp_path / "runs").exists()


def test_jobs_after_one_that_failed_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "recipes", _NothingToRead)
    monkeypatch.setattr(jobs, "build_algorithm", lambda recipe: None)
    ran: list[int] = []

    def command(job: DictConfig) -> None:
        ran.append(job.seed)
        if job.seed == 2:
            raise UserError("seed=2 is even")

    with pytest.raises(Failure, match=r"1 of 3 jobs failed: 2"):
        jobs.run_jobs(
            [
                OmegaConf.create({"seed": seed, "run_dir": None, "output": None})
                for seed in (1, 2, 3)
            ],
            command,
        )
    assert ran == [1, 2, 3] and "job 2 of 3 failed: seed=2 is even" in capsys.readouterr().err


class _NothingToRead:
    @staticmethod
    def read(job: DictConfig) -> DictConfig:
        return OmegaConf.create({"algorithm": {"name": "ppo"}})


def test_the_evaluation_of_a_classifier_has_no_earlier_one(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path
) -> None:
    quick = (
        "run_dir=run",
        "checkpoints.every=1",
        "algorithm.demonstrations.episodes=8",
        "iterations=2",
    )
    assert rlinf_vla(*counting.arguments("train", "counting_classifier", *quick)).code == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000002")
    (tmp_path / "run" / "evaluation" / "after.json").unlink()
    found = rlinf_vla("train", "run=run")
    assert found.code == 0 and "continuing after iteration 1" in found.out, found.out + found.err
    assert not list((tmp_path / "run" / "evaluation").glob("step_*"))
    longer = rlinf_vla("train", "run=run", "iterations=3").complaint
    assert "algorithm=classifier: the learning rate falls until the last iteration" in longer

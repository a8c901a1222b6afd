"""A run of Cal-QL by the command line, in counter world: its phases, its end and resume, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlinf_vla.data import lerobot_format as form
from rlinf_vla.telemetry.metrics import read_metrics
from tests.cli.conftest import CommandLine, Counting
from tests.cli.counting_plugins import announce
from tests.cli.runs import assert_same_files
from tests.data.test_from_dataset import played, write
from tests.forked import Forked

ROOT = Path(__file__).parents[2]
WORDS = (
    "evaluation.before_and_after=false",
    "checkpoints.keep=9",
    "rollout.pipeline_depth=1",
    "algorithm.dataset=data",
)


@pytest.fixture
def recorded(counting: Counting, tmp_path: Path) -> Counting:
    write(tmp_path / "data", played())
    return counting


@pytest.mark.parametrize("kept", [1, 2])
def test_it_resumes_offline_and_where_it_goes_online(
    rlinf_vla: CommandLine, recorded: Counting, tmp_path: Path, kept: int
) -> None:
    """From iteration 1 of the 2 offline ones, and from the last one; the dataset is gone by then."""
    for folder in ("whole", "parts"):
        found = rlinf_vla(
            *recorded.arguments("train", "counting_cal_ql", *WORDS, f"run_dir={folder}")
        )
        assert found.code == 0, found.err
    for step in range(kept + 1, 5):
        (tmp_path / "parts" / "checkpoints" / f"step_{step:06d}").rename(tmp_path / f"lost_{step}")
    (tmp_path / "data").rename(tmp_path / "moved")
    found = rlinf_vla("train", "run=parts")
    assert f"continuing after iteration {kept}" in found.out, found.err
    assert_same_files(tmp_path / "whole", tmp_path / "parts", 4)
    lines = [line for line in read_metrics(tmp_path / "whole") if "cal_ql/offline" in line]
    assert [line["cal_ql/offline"] for line in lines] == [1, 1, 0, 0]
    assert ["rollout/steps" in line for line in lines] == [False, False, True, True]


def test_evaluations_are_as_scheduled(
    rlinf_vla: CommandLine, recorded: Counting, tmp_path: Path
) -> None:
    words = (*WORDS[1:], "episodes=2", "evaluation.every=1", "run_dir=run", "iterations=3")
    assert rlinf_vla(*recorded.arguments("train", "counting_cal_ql", *words)).code == 0
    names = {path.stem for path in (tmp_path / "run" / "evaluation").glob("*.json")}
    assert {"before", "step_000001", "step_000002", "after"} <= names


def without(directory: Path, feature: str) -> None:
    path = directory / form.INFO
    info = json.loads(path.read_text())
    del info["features"][feature]
    path.write_text(json.dumps(info))


@pytest.mark.parametrize("recipe", ["counting_cal_ql", "counting_sac"])
def test_a_dataset_without_rewards_is_refused_first(
    rlinf_vla: CommandLine, recorded: Counting, tmp_path: Path, recipe: str
) -> None:
    without(tmp_path / "data", form.REWARD)
    said = rlinf_vla(*recorded.arguments("train", recipe, *WORDS, "run_dir=run")).complaint
    assert said.startswith("algorithm.dataset=data has no rewards (next.reward)")
    missing = ("algorithm.dataset=nowhere", "run_dir=run")
    assert "nowhere" in rlinf_vla(*recorded.arguments("train", recipe, *missing)).complaint
    assert not (tmp_path / "run").exists() and not recorded.plugin.created


def test_what_makes_no_sense_is_refused_first(
    rlinf_vla: CommandLine, recorded: Counting, tmp_path: Path
) -> None:
    def said(*words: str) -> str:
        return rlinf_vla(
            *recorded.arguments("train", "counting_cal_ql", *words, "run_dir=run")
        ).complaint

    assert "algorithm.offline_iterations=2 learn from demonstrations alone" in said()
    assert "are part of the 1 iterations of the run" in said(*WORDS, "iterations=1")
    assert not (tmp_path / "run").exists() and not recorded.plugin.created


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_cal_ql_has_the_same_bits_on_ray(
    recorded: Counting, forked: Forked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And resumed between its phases; on two ranks it has its phases, too."""
    announce(tmp_path / "package")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'package'}:{ROOT}")
    ray = ("cluster.runtime=ray", "cluster.rollout_workers=2", "cluster.weights=broadcast")
    ranks = (*ray[:2], "cluster.trainer_ranks=2")

    def run(folder: str, *words: str) -> None:
        arguments = recorded.arguments(
            "train", "counting_cal_ql", *WORDS, *words, f"run_dir={folder}"
        )
        done = forked(arguments, tmp_path, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, done.stdout + done.stderr

    run("here", "reward=success")
    run("there", "reward=success", "iterations=2", *ray)
    run("there", "reward=success", "resume=auto", *ray)
    assert_same_files(tmp_path / "here", tmp_path / "there", 4)
    run("two", *ranks)
    run("parts", "iterations=2", *ranks)
    run("parts", "resume=auto", *ranks)
    assert_same_files(tmp_path / "two", tmp_path / "parts", 4)

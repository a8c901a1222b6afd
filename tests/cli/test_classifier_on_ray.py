"""Reward classifiers on Ray: what one process trains, whoever divides the batches and whoever dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.cli.conftest import CLASSIFIER, SFT
from tests.cli.counting_plugins import announce
from tests.cli.own_signal import SECOND_ITERATION, kill_rank, when_it_prints
from tests.cli.runs import assert_same_files

ROOT = Path(__file__).parents[2]
LAST = 24
STEPS = (
    f"iterations={LAST}",
    "checkpoints.every=1",
    f"checkpoints.keep={LAST}",
    "cluster.update_threads=1",
)
ON_RAY = "cluster.runtime=ray"

Start = Callable[..., subprocess.Popen[bytes]]
Train = Callable[..., str]

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of this module are, with their recipes and plug-ins, which are installed for their processes only."""
    found = tmp_path_factory.mktemp("runs")
    announce(found / "package")
    (found / "recipe").mkdir()
    (found / "recipe" / "counting_classifier.yaml").write_text(CLASSIFIER)
    LinearPolicy(LinearOptions(chunk=2)).save(found / "model")
    sft = SFT.format(
        name="counting_sft", algorithm="sft", iterations=4, rank=0, checkpoint=found / "model"
    )
    (found / "recipe" / "counting_sft.yaml").write_text(sft)
    value = sft.replace("algorithm: sft", "algorithm: value").replace("counting_sft", "value")
    (found / "recipe" / "counting_value.yaml").write_text(value)
    return found


@pytest.fixture(scope="module")
def start(folder: Path) -> Start:
    """Starts a command in a process that writes all it says into ``run.log``."""

    def started(verb: str, run: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "rlinf_vla.cli.main", verb, *arguments]
        paths = {
            "PYTHONPATH": f"{folder / 'package'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        with (folder / f"{run}.log").open("a") as log:  # Ray's processes would keep a pipe open
            return subprocess.Popen(
                command, cwd=folder, env=os.environ | paths, stdout=log, stderr=subprocess.STDOUT
            )

    return started


@pytest.fixture(scope="module")
def train(folder: Path, start: Start) -> Train:
    """Trains to the end; returns what the command said."""

    def trained(run: str, *overrides: str, recipe: str = "counting_classifier") -> str:
        process = start(
            "train",
            run,
            "--config-dir",
            str(folder),
            f"recipe={recipe}",
            f"run_dir={run}",
            *overrides,
        )
        try:
            code = process.wait(timeout=280)
        finally:
            process.kill()
        said = (folder / f"{run}.log").read_text()
        assert code == 0, said
        return said

    return trained


@pytest.fixture(scope="module")
def here(folder: Path, train: Train) -> Path:
    """The run in one process."""
    train("here", *STEPS)
    return folder / "here"


def evaluation(run: Path) -> object:
    return json.loads((run / "evaluation" / "after.json").read_text())


def test_the_same_bits_although_the_trainer_is_killed(
    here: Path, folder: Path, train: Train
) -> None:
    there = folder / "there"
    arguments = (*STEPS, ON_RAY, "cluster.rollout_workers=2")
    with when_it_prints(SECOND_ITERATION, folder / "package", kill_rank(there, 0)):
        said = train("there", *arguments)
    assert "trainer 0 was lost" in said and "reward classifier: " in said, said
    assert_same_files(here, there, LAST)
    assert evaluation(here) == evaluation(there)
    assert (here / "classifier" / "model.safetensors").read_bytes() == (
        there / "classifier" / "model.safetensors"
    ).read_bytes()

    for step in range(3, LAST + 1):
        (there / "checkpoints" / f"step_{step:06d}").rename(folder / f"lost_{step}")
    assert "continuing after iteration 2" in train("there", *arguments, "resume=auto")
    assert_same_files(here, there, LAST)


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_ranks_divide_the_batches(folder: Path, train: Train, sharding: str) -> None:
    """Adam multiplies the rounding of a gradient near zero by up to the learning rate, so that this is low."""
    for run, cluster in (
        ("one", ()),
        (sharding, (ON_RAY, "cluster.trainer_ranks=2", f"cluster.trainer_sharding={sharding}")),
    ):
        if not (folder / run).exists():
            train(run, *STEPS, *cluster, "iterations=4", "algorithm.learning_rate=1e-4")
    for file in ("heads", "optimizer"):
        one, two = (
            load_file(folder / run / "checkpoints" / "step_000004" / f"{file}.safetensors")
            for run in ("one", sharding)
        )
        assert one.keys() == two.keys()
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, rtol=0, atol=1e-6)
    assert evaluation(folder / "one") == evaluation(folder / sharding)
    workers = json.loads((folder / sharding / "placement.json").read_text())["workers"]
    assert [worker["role"] for worker in workers].count("trainer") == 2


def test_a_dataset_needs_no_simulator(folder: Path, start: Start, train: Train) -> None:
    """As in one process: neither frames nor demonstrations of a dataset, whose path is relative."""
    record = [
        "record.failures=true",
        "record.video=false",
        "algorithm.demonstrations.noise=[0.0,1.0]",
    ]
    found = start(
        "record",
        "data",
        "--config-dir",
        str(folder),
        "recipe=counting_sft",
        "output=data",
        "algorithm.demonstrations.episodes=24",
        *record,
    )
    assert found.wait(timeout=280) == 0, (folder / "data.log").read_text()
    shown = (
        *STEPS,
        "iterations=3",
        "algorithm.demonstrations.dataset=data",
    )
    unplayed = "evaluation.before_and_after=false"
    for recipe in ("counting_classifier", "counting_sft", "counting_value"):
        for run, cluster in ((f"{recipe}_here", ()), (f"{recipe}_there", (ON_RAY,))):
            played = () if recipe == "counting_value" else (unplayed,)
            said = train(run, *shown, *played, *cluster, recipe=recipe)
            assert "data: " in said and "environments" not in said, said
        assert_same_files(folder / f"{recipe}_here", folder / f"{recipe}_there", 3)
    assert evaluation(folder / "counting_value_here") == evaluation(folder / "counting_value_there")

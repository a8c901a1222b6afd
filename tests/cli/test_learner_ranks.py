"""Off-policy training on several trainer ranks of a Ray cluster: the weights of one process, also after a rank was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.cli.conftest import CommandLine, Counting
from tests.cli.counting_plugins import announce
from tests.cli.own_signal import SECOND_ITERATION, kill_rank, when_it_prints
from tests.cli.runs import assert_same_files, checkpoint

ROOT = Path(__file__).parents[2]
ITERATIONS = 8
RLPD = (
    "algorithm.demonstrations=3",
    "algorithm.sft_coef=0.1",
    "algorithm.replay_capacity=60",
    "evaluation.before_and_after=false",
)
RANKS = ("cluster.runtime=ray", "cluster.trainer_ranks=2")


def start(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "rlinf_vla.cli.main", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=280)
    assert process.returncode == 0, said
    return said


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_two_ranks_one_of_them_killed(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(tmp_path / "package")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'package'}:{ROOT}")
    LinearPolicy(LinearOptions(chunk=1)).save(tmp_path / "single")
    common = [
        f"model.checkpoint={tmp_path}/single",
        f"iterations={ITERATIONS}",
        f"checkpoints.keep={ITERATIONS}",
        "reward=success",
    ]

    def arguments(folder: str, *more: str) -> list[str]:
        return counting.arguments(
            "train", "counting_sac", f"run_dir={folder}", *common, *RLPD, *more
        )

    ended(start(arguments("one"), tmp_path))
    ended(start(arguments("two", *RANKS), tmp_path))
    with when_it_prints(SECOND_ITERATION, tmp_path / "package", kill_rank(tmp_path / "killed", 1)):
        said = ended(start(arguments("killed", *RANKS), tmp_path))
    assert "trainer 1 was lost" in said and "resuming from killed/checkpoints/step_" in said
    assert_same_files(tmp_path / "two", tmp_path / "killed", ITERATIONS)
    one, two = (checkpoint(tmp_path / folder, ITERATIONS) for folder in ("one", "two"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            two[name], value, rtol=0, atol=1e-6, msg=lambda said, name=name: f"{name}: {said}"
        )
    stored = [
        len(
            list(
                (
                    tmp_path / "two" / "replay" / "demonstrations" / f"rank_{rank}" / "records"
                ).iterdir()
            )
        )
        for rank in range(2)
    ]
    assert all(stored), "each rank has demonstrations"
    alone = rlinf_vla(
        "train",
        "run=two",
        f"iterations={ITERATIONS + 1}",
        "cluster.runtime=in_process",
        "cluster.trainer_ranks=1",
    )
    assert (
        "are divided among 2 trainer ranks, not 1: resume with cluster.trainer_ranks=2"
        in alone.complaint
    )


def test_what_ranks_of_an_off_policy_algorithm_cannot_do(
    rlinf_vla: CommandLine, counting: Counting
) -> None:
    many = rlinf_vla(
        *counting.arguments(
            "train", "counting_sac", "cluster.runtime=ray", "cluster.trainer_ranks=5"
        )
    ).complaint
    assert many.startswith(
        "cluster.trainer_ranks=5 is more than algorithm.episodes=4: each rank stores episodes of its own"
    )
    sharded = rlinf_vla(
        *counting.arguments("train", "counting_sac", *RANKS, "cluster.trainer_sharding=full")
    ).complaint
    assert (
        sharded
        == "algorithm=sac is off-policy: use rollout.split=none and cluster.trainer_sharding=none"
    )
    split = rlinf_vla(
        *counting.arguments("train", "counting_sac", *RANKS, "cluster.trainer_split=measured")
    ).complaint
    assert (
        split
        == "cluster.trainer_split=measured is for on-policy algorithms: algorithm=sac is off-policy, use even"
    )
    turns = rlinf_vla(
        *counting.arguments("train", "counting_sac", *RANKS, "cluster.offload=true")
    ).complaint
    assert (
        turns == "cluster.offload=true is for on-policy algorithms without staleness: leave it out"
    )

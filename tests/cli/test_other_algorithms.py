"""Algorithms of other packages, A2C and TD3, have all features of the engine's algorithms without any code in the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.cli.conftest import COUNTING, CommandLine, Counting
from tests.cli.counting_plugins import announce
from tests.cli.runs import assert_same_files, checkpoint
from tests.features.planner.made_up import profile
from tests.forked import Forked

ROOT = Path(__file__).parents[2]
ENTRY_POINTS = (
    "[rlinf_vla.algorithms]\na2c = tests.algorithms.a2c:A2C\ntd3 = tests.algorithms.td3:TD3\n"
)
KEYS = {
    "a2c": "  horizon: 12\n  minibatch_size: 10\n  learning_rate: 0.05\n  target_kl: null\n",
    "td3": "  episodes: 4\n  updates_per_step: 0.2\n  batch_size: 8\n  hidden: 16\n",
}
QUICK = (
    "evaluation.before_and_after=false",
    "iterations=3",
    "checkpoints.keep=9",
    "rollout.pipeline_depth=1",
)


@pytest.fixture
def strangers(counting: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Recipes ``counting_a2c`` and ``counting_td3``, and the package with the algorithms on the import path."""
    package = tmp_path / "package"
    announce(package)
    found = package / "algorithms-0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: algorithms\nVersion: 0\n")
    (found / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.setenv("PYTHONPATH", f"{package}:{ROOT}")
    for name, keys in KEYS.items():
        text = COUNTING.format(
            name=f"counting_{name}",
            algorithm=name,
            iterations=3,
            rank=0,
            checkpoint=counting.folder / "model",
        )
        (counting.folder / "recipe" / f"counting_{name}.yaml").write_text(text + keys)
    return counting


def train(rlinf_vla: CommandLine, arguments: list[str]) -> str:
    found = rlinf_vla(*arguments)
    assert found.code == 0, found.out + found.err
    return found.out


@pytest.mark.parametrize("name", list(KEYS))
def test_it_trains_and_resumes(
    rlinf_vla: CommandLine, strangers: Counting, tmp_path: Path, name: str
) -> None:
    for folder in ("whole", "parts"):
        train(
            rlinf_vla, strangers.arguments("train", f"counting_{name}", *QUICK, f"run_dir={folder}")
        )
    for step in (2, 3):
        (tmp_path / "parts" / "checkpoints" / f"step_{step:06d}").rename(tmp_path / f"lost_{step}")
    assert "continuing after iteration 1" in train(rlinf_vla, ["train", "run=parts"])
    assert_same_files(tmp_path / "whole", tmp_path / "parts", 3)


def test_it_has_a_plan(rlinf_vla: CommandLine, strangers: Counting, tmp_path: Path) -> None:
    profile(chunk=2, episode_limit=6).write(tmp_path / "known.json")
    said = train(
        rlinf_vla,
        strangers.arguments(
            "plan", "counting_a2c", "run_dir=plan", f"profile={tmp_path / 'known.json'}"
        ),
    )
    assert "macro flow of a2c" in said and "chosen: " in said
    said = train(rlinf_vla, strangers.arguments("plan", "counting_td3"))
    assert (
        "macro flow of td3" in said and "update_from_replay" in said and "there is one plan" in said
    )


def test_its_keys_and_values_are_checked(rlinf_vla: CommandLine, strangers: Counting) -> None:
    unknown = rlinf_vla(
        *strangers.arguments("train", "counting_td3", "algorithm.smothing=0.1")
    ).complaint
    assert "algorithm.smothing is not a key; did you mean algorithm.smoothing?" in unknown
    low = rlinf_vla(
        *strangers.arguments("train", "counting_td3", "algorithm.exploration=0")
    ).complaint
    assert low.startswith("algorithm.exploration=0")


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*KEYS, "sac", "dagger", "sft"])
def test_the_same_bits_on_ray(
    strangers: Counting, forked: Forked, tmp_path: Path, name: str
) -> None:
    on_ray = ["cluster.runtime=ray", "cluster.rollout_workers=2", "cluster.weights=broadcast"]
    words = (*QUICK, "reward=success")
    if name == "sft":  # its moving average is published, saved and evaluated
        words += ("algorithm.ema_decay=0.5", "evaluation.before_and_after=true", "episodes=4")
    there = strangers.arguments("train", f"counting_{name}", *words, "run_dir=there", *on_ray)
    here = strangers.arguments("train", f"counting_{name}", *words, "run_dir=shaped")
    resumed = (
        [[*there, "iterations=2"], [*there, "resume=auto"]]
        if name in ("sac", "td3", "dagger")
        else [there]
    )
    for arguments in (here, *resumed):
        done = forked(arguments, tmp_path, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, done.stdout + done.stderr
    assert_same_files(tmp_path / "shaped", tmp_path / "there", 3)
    after = [tmp_path / folder / "evaluation" / "after.json" for folder in ("shaped", "there")]
    if name == "sft":
        documents = [json.loads(path.read_text())["greedy"]["episodes"] for path in after]
        assert documents[0] == documents[1]


TAUGHT = ("iterations=3", "algorithm.episodes=5", "algorithm.beta=null", "algorithm.updates=3")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_policy_teaches_on_two_ranks(strangers: Counting, forked: Forked, tmp_path: Path) -> None:
    """Each rank has the teacher. On one worker the bits are those of one process, on two ranks its
    weights up to the order of sums; a resumed run has the same bits."""
    teacher = LinearPolicy(LinearOptions(chunk=2, seed=1))
    teacher.save(tmp_path / "teacher")
    keys = [*QUICK, *TAUGHT, f"algorithm.teacher={tmp_path / 'teacher'}", "reward=success"]
    keys.append("algorithm.loss=reverse_kl")
    ray = ["cluster.runtime=ray", "cluster.rollout_workers=2"]
    ranks = [*ray, "cluster.trainer_ranks=2"]

    def run(folder: str, *more: str) -> None:
        words = [*keys, f"run_dir={folder}", *more]
        done = forked(
            strangers.arguments("train", "counting_dagger", *words),
            tmp_path,
            CUDA_VISIBLE_DEVICES="",
        )
        assert done.returncode == 0, done.stdout + done.stderr

    run("here")
    run("there", *ray)
    assert_same_files(tmp_path / "here", tmp_path / "there", 3)
    run("two", *ranks)
    run("parts", *ranks, "iterations=2")
    run("parts", *ranks, "resume=auto")
    assert_same_files(tmp_path / "two", tmp_path / "parts", 3)
    here, two = (checkpoint(tmp_path / folder, 3) for folder in ("here", "two"))
    assert here.keys() == two.keys()
    for name, value in here.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-5, msg=name)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_imitation_on_all_gpus_of_a_cluster(
    strangers: Counting, forked: Forked, tmp_path: Path
) -> None:
    """Fake GPUs; the same weights as in one process, up to the order of sums over ranks."""
    more = (
        "evaluation.before_and_after=true",
        "evaluation.filmed=0",
        "episodes=4",
        "cluster.micro_batch_size=8",
    )
    gpus = ("cluster.nodes=[{name: node, gpus: 4}]", "cluster.device=fake_gpu", "cluster.plan=auto")
    for folder, cluster in (("one", ()), ("four", gpus)):
        arguments = strangers.arguments(
            "train", "counting_sft", *QUICK, *more, f"run_dir={folder}", *cluster
        )
        done = forked(arguments, tmp_path, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "Ray, collocated, 1 rollout worker of 1 environment group, 4 trainer ranks" in done.stdout
    )
    workers = json.loads((tmp_path / "four" / "placement.json").read_text())["workers"]
    assert len({worker["gpus"][0] for worker in workers if worker["role"] == "trainer"}) == 4
    one, four = (
        load_file(tmp_path / folder / "policy" / "model.safetensors") for folder in ("one", "four")
    )
    assert one.keys() == four.keys()
    for name, value in one.items():
        torch.testing.assert_close(four[name], value, rtol=0, atol=1e-6)
    assert (tmp_path / "four" / "evaluation" / "after.json").exists()

"""Settings of official trainers in whole runs of imitation (see docs/imitation.md)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlinf_vla.training import lora
from tests.cli.conftest import CommandLine, Counting
from tests.cli.runs import assert_same_files, checkpoint, metrics
from tests.models.tiny_openvla import smaller_directory

Train = Callable[..., Path]

QUICK = (
    "evaluation.before_and_after=false",
    "algorithm.demonstrations.episodes=4",
    "rollout.pipeline_depth=1",
)


@pytest.mark.parametrize(
    "words, complaint",
    [
        (
            ("algorithm.schedule=step",),
            "algorithm.schedule=step needs the step at which the learning rate falls: set algorithm.decay_steps",
        ),
        (
            ("algorithm.schedule=linear",),
            "algorithm.schedule=linear is not known: use cosine or step",
        ),
        (
            ("algorithm.learning_rate_end=2",),
            "algorithm.learning_rate_end=2.0 is out of range: use a number from 0 to 1",
        ),
        (
            ("algorithm.adam_beta2=1",),
            "algorithm.adam_beta2=1.0 is out of range: use a number of at least 0 and below 1",
        ),
        (
            ("algorithm.ema_decay=1",),
            "algorithm.ema_decay=1.0 is out of range: use a number above 0 and below 1, or null",
        ),
        (
            ("algorithm.augmentation=strong",),
            "algorithm.augmentation=strong is not known: use none or official",
        ),
        (
            ("algorithm.augmentation=official",),
            "algorithm.augmentation=official: linear does not declare an official augmentation of its images",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    rlinf_vla: CommandLine,
    counting: Counting,
    tmp_path: Path,
    words: tuple[str, ...],
    complaint: str,
) -> None:
    """Before there is a run directory."""
    assert rlinf_vla(*counting.arguments("train", "counting_sft", *words)).complaint == complaint
    assert not (tmp_path / "runs").exists()


def test_a_constant_learning_rate_does_not_depend_on_the_runs_length(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path
) -> None:
    words = (*QUICK, "algorithm.learning_rate_end=1", "run_dir=run")
    arguments = counting.arguments("train", "counting_sft", *words, "iterations=2")
    assert rlinf_vla(*arguments).code == 0
    assert rlinf_vla("train", "run=run", "iterations=20").code == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["sft/learning_rate"] for line in lines} == {0.05}


AVERAGED = (
    *QUICK,
    "algorithm.decay_steps=10",
    "iterations=10",
    "algorithm.ema_decay=0.8",
    "checkpoints.every=2",
    "checkpoints.keep=9",
)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_moving_average_acts_and_resumes_while_training_goes_on_without_it(
    train: Train, rlinf_vla: CommandLine, tmp_path: Path, rank: int
) -> None:
    adapters = f"model.lora.rank={rank}"
    evaluated = ("evaluation.before_and_after=true", "evaluation.filmed=0", "episodes=4")
    whole = train("whole", *AVERAGED, *evaluated, adapters, recipe="counting_sft")
    train("parts", *AVERAGED, adapters, "iterations=2", recipe="counting_sft")
    assert rlinf_vla("train", "run=parts", "iterations=10").code == 0
    assert_same_files(whole, tmp_path / "parts", 10)

    plain = train("plain", *AVERAGED, adapters, "algorithm.ema_decay=null", recipe="counting_sft")
    assert losses(plain) == losses(whole)
    averaged, raw = checkpoint(whole, 10), checkpoint(plain, 10)
    kept = [name.removesuffix(".average") for name in averaged if name.endswith(".average")]
    files = {name.rpartition(":")[2]: name for name in raw if not name.startswith("optimizer")}
    assert kept and len(kept) == len(files)
    for name in kept:
        key = files[as_saved(name.removeprefix("optimizer.safetensors:"))]
        assert torch.equal(averaged[f"{name}.master"], raw[key]), "the weights that learn"
        assert torch.equal(averaged[f"{name}.average"], averaged[key]), "the weights that act"
        assert torch.equal(averaged[key], raw[key]) == name.startswith(
            "optimizer.safetensors:value"
        )

    found = rlinf_vla("eval", "run=whole", "evaluation.filmed=0", "run_dir=again")
    assert found.code == 0, found.out + found.err
    again = json.loads((tmp_path / "again" / "evaluation" / "step_000010.json").read_text())
    after = json.loads((whole / "evaluation" / "after.json").read_text())
    assert again["greedy"]["episodes"] == after["greedy"]["episodes"]
    if rank == 0:
        policy = load_file(next((whole / "policy").rglob("*.safetensors")))
        assert all(
            any(torch.equal(value, averaged[key]) for key in files.values())
            for value in policy.values()
        )


def augmented(package: Path, *words: str) -> list[str]:
    """Imitation of the expert by an OpenVLA in counter world."""
    return [
        "train",
        "--config-dir",
        str(package),
        "recipe=counted",
        "algorithm=sft",
        f"model.checkpoint={package / 'model'}",
        "model.options.random_weights=true",
        "model.options.prompt_length=56",
        "model.lora.rank=0",
        "env.num_envs=2",
        "iterations=10",
        "checkpoints.every=5",
        "checkpoints.keep=9",
        "algorithm.batch_size=8",
        "algorithm.decay_steps=10",
        "algorithm.augmentation=official",
        *QUICK,
        *words,
    ]


def test_augmented_images_are_the_same_in_a_resumed_run(
    rlinf_vla: CommandLine, package: Path
) -> None:
    smaller_directory(package / "model")
    crop = "model.options.center_crop=true"
    for words in (
        ("run_dir=whole",),
        ("run_dir=parts", "iterations=5"),
        ("run_dir=plain", "algorithm.augmentation=none"),
        ("run_dir=rows", "cluster.micro_batch_size=3"),
    ):
        found = rlinf_vla(*augmented(package, crop, *words))
        assert found.code == 0, found.out + found.err
    assert rlinf_vla("train", "run=parts", "iterations=10").code == 0
    assert_same_files(package / "whole", package / "parts", 10)
    whole = losses(package / "whole")
    assert whole != losses(package / "plain")
    assert whole == pytest.approx(losses(package / "rows"), rel=1e-4)


def test_a_model_that_acts_on_whole_images_is_not_trained_on_crops(
    rlinf_vla: CommandLine, package: Path
) -> None:
    smaller_directory(package / "model")
    found = rlinf_vla(*augmented(package))
    assert found.code == 2
    assert found.complaint == (
        "algorithm.augmentation=official: openvla crops images in training, so it must also do so "
        "when it acts: set model.options.center_crop=true"
    )


def losses(run: Path) -> list[float]:
    found = [line["sft/loss"] for line in metrics(run)]
    assert found
    return found


def as_saved(name: str) -> str:
    """Return the name of a weight in its file of a checkpoint."""
    return lora.adapter_name(name.removeprefix("backbone.")) if lora.is_lora(name) else name


MIXTURE = "algorithm.demonstrations.mixture=[{dataset: one, weight: 3}, {dataset: other}]"


@pytest.fixture
def recorded(rlinf_vla: CommandLine, counting: Counting) -> None:
    """Two datasets, of 3 and 6 episodes."""
    for name, episodes in (("one", 3), ("other", 6)):
        keys = [f"algorithm.demonstrations.episodes={episodes}", "record.failures=true"]
        command = counting.arguments("record", "counting_sft", f"output={name}", *keys)
        assert rlinf_vla(*command, "record.video=false").code == 0


@pytest.mark.slow
@pytest.mark.usefixtures("recorded")
def test_a_mixture_is_imitated_and_resumes(
    train: Train, rlinf_vla: CommandLine, tmp_path: Path
) -> None:
    keys = [*QUICK, "algorithm.decay_steps=10", "iterations=10", "checkpoints.every=5"]
    whole = train("whole", *keys, MIXTURE, recipe="counting_sft")
    train("parts", *keys, MIXTURE, "iterations=5", recipe="counting_sft")
    assert rlinf_vla("train", "run=parts", "iterations=10").code == 0
    assert_same_files(whole, tmp_path / "parts", 10)
    even = train("even", *keys, MIXTURE.replace("3", "1"), recipe="counting_sft")
    assert losses(even) != losses(whole), "the weights count"


@pytest.mark.usefixtures("recorded")
def test_a_mixture_is_imitated_beside_reinforcement_learning(train: Train) -> None:
    run = train("run", QUICK[0], MIXTURE, "algorithm.sft_coef=1", "iterations=1")
    assert "sft/loss" in metrics(run)[-1]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            [MIXTURE.replace("3", "0")],
            "mixture[0].weight=0.0 is out of range: use a number above 0",
        ),
        ([MIXTURE.replace("3", "nan")], "mixture[0].weight=nan is out of range"),
        ([MIXTURE.replace("3", "heavy")], "algorithm.demonstrations.mixture"),
        ([MIXTURE.replace("one", "nowhere")], "nowhere is not a directory"),
        ([MIXTURE.replace("dataset: one, ", "")], "mixture[0].dataset= cannot be used"),
        (
            [MIXTURE.replace("dataset: one", "data: one")],
            "an entry of algorithm.demonstrations.mixture has no key data",
        ),
        ([MIXTURE, "algorithm.demonstrations.dataset=one"], "exclude each other"),
    ],
)
def test_mixtures_that_make_no_sense_are_refused(
    rlinf_vla: CommandLine, counting: Counting, words: list[str], complaint: str
) -> None:
    command = counting.arguments("train", "counting_sft", "run_dir=run", *QUICK, *words)
    assert complaint in rlinf_vla(*command).complaint

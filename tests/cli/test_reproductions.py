"""Recipes of published runs, ``repro_*``: each composes, fits, and runs an iteration on stand-ins of what it names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlinf_vla.cli import compose
from rlinf_vla.cli import list as list_command
from rlinf_vla.runtime import recipes
from rlinf_vla.telemetry.metrics import read_metrics
from tests.cli.conftest import CommandLine
from tests.envs.scene25 import published_folder
from tests.hub_server import Hub
from tests.skips import require
from tests.stand_ins import PAGE, STAND_INS, page

FOLDER = Path(__file__).parents[2] / "recipes" / "recipe"
NAMES = [name for name in list_command.recipe_names("recipe") if name.startswith("repro_")]
TRAINED = [name for name in NAMES if not name.endswith("_eval")]
SMALL = {
    "ppo": ("algorithm.horizon=${episodes:1}", "algorithm.minibatch_size=1"),
    "grpo": (
        "algorithm.episodes=4",
        "algorithm.group_size=2",
        "algorithm.minibatch_size=1",
        "algorithm.resample=0",
    ),
}
"""Sizes for which published runs need eight GPUs, by algorithm."""
PLAYED = (
    *(
        "episodes=2",
        "env.num_envs=2",
        "env.processes=1",
        "env.episode_limit=10",
        "rollout.batch_size=2",
    ),
    *("rollout.pipeline_depth=1", "evaluation.filmed=0", "model.options.dtype=float32"),
)
"""Sizes of an evaluation."""
TRAINING = (
    *PLAYED,
    "iterations=1",
    "cluster.trainer_sharding=none",
    "evaluation.before_and_after=false",
)
ONE_TASK = {
    "repro_rlinf_oft_ppo_eval": "env.tasks=[PutOnPlateInScene25MultiCarrot-v1-test]",
    "repro_rlinf_libero_10_grpo_eval": "env.tasks=[3]",
    "repro_pirl_pi05_maniskill_sde_eval": "env.tasks=[PutOnPlateInScene25Main-v3]",
}
"""Evaluations that are run, each of one task."""
WRONG = {
    "suite": (
        "repro_simplevla_10",
        "env.suite=libero_spatial",
        "the policy was trained on libero_10 alone, env.suite has libero_spatial-0",
    ),
    "key": (
        "repro_rl4vla_ppo",
        "model.options.unnorm_key=warm_up",
        "has statistics for ['bridge_orig', 'warmup'], choose one",
    ),
    "unit": (
        "repro_rl4vla_ppo",
        "env.task=PlaceSphere env.control_mode=pd_ee_delta_pose env.image_size=224 env.version=rlinf",
        "an action of 1 means 1 m",
    ),
    "card": (
        "repro_pirl_pi0_maniskill_sde",
        "model.options.card=rlinf_pi0_libero",
        "the policy needs image 'wrist'",
    ),
    "state": (
        "repro_pirl_pi05_maniskill_noise",
        "env.state=tool",
        "the policy needs state as qpos, the environment gives quaternion: set env.state=qpos",
    ),
    "gripper": (
        "repro_pirl_pi0_maniskill_sde",
        "model.options.gripper=close_positive",
        "set model.options.gripper=open_positive",
    ),
    "horizon": (
        "repro_pirl_pi05_maniskill_noise",
        "model.options.chunk=9",
        "model.options.chunk=9 is more than the model's horizon of 8 actions",
    ),
    "adapter": (
        "repro_rlinf_oft_ppo",
        "model.lora.adapter=hf://RLinf/RLinf-Pi05-LIBERO-SFT",
        "is not a PEFT directory",
    ),
}
"""What -> a recipe, keys that do not fit it, and words of the refusal."""
OF_EACH_KIND = {
    *(
        "repro_rl4vla_ppo",
        "repro_rlinf_openvla_grpo",
        "repro_rlinf_oft_ppo",
        "repro_rlinf_libero_130_grpo",
    ),
    *(
        "repro_simplevla_10",
        "repro_pirl_pi0_10_ppo",
        "repro_pirl_pi05_spatial_grpo",
        "repro_pirl_pi05_maniskill_noise",
    ),
}
"""One for each preset and kind of model; the others differ in suite, repository and numbers."""
PLAYED_OFTEN = {
    "repro_rl4vla_ppo",
    "repro_pirl_pi05_maniskill_noise",
}
"""Of these, two play an iteration for each change, and README's command on LIBERO (test_published_commands.py)."""
ON_A_GPU = {"repro_rlinf_oft_ppo"}
"""tests/cli/test_simulated_gpu.py has the other kinds of models."""


def marked(often: Iterable[str], names: Iterable[str] = TRAINED) -> list[Any]:
    """Names of recipes; those that are not run ``often`` are run nightly."""
    return [
        pytest.param(name, marks=() if name in often else pytest.mark.nightly) for name in names
    ]


def verb(name: str) -> str:
    return "eval" if name.endswith("_eval") else "train"


def of_simulator(name: str, tmp_path: Path) -> list[str]:
    """Keys of a recipe for a test. Skips where its simulator is not there."""
    keys = ["env.backend=cpu", f"env.asset_dir={tmp_path}"]
    if (
        recipes.read(compose.load(verb(name), [f"recipe={name}", "cluster=laptop"])).env.name
        == "libero"
    ):
        require("libero")
        keys = []
    else:
        require("maniskill")
        published_folder(tmp_path)
    return [f"recipe={name}", *keys]


@pytest.mark.parametrize("name", NAMES)
def test_it_names_its_source_and_what_it_changes_of_its_preset(name: str) -> None:
    config = compose.load(verb(name), [f"recipe={name}", "cluster=8gpu"])
    recipe = recipes.read(config)
    assert recipe.name == name
    assert re.search(r"arXiv \d{4}\.\d{5}", list_command.recipe_names("recipe")[name])
    for repository in (recipe.model.checkpoint, recipe.model.lora.adapter):
        assert repository is None or repository.removeprefix("hf://") in STAND_INS
    if verb(name) == "eval":
        return
    assert recipe.preset.name, "its settings are those of a preset"
    published = compose.load(
        "train", [f"recipe={name}", "cluster=8gpu", f"preset={recipe.preset.name}"]
    )
    stated = dict(settings((FOLDER / f"{name}.yaml").read_text()))
    for node in ("algorithm", "rollout", "evaluation"):
        before, after = (OmegaConf.to_container(each[node]) for each in (published, config))
        assert isinstance(before, dict) and isinstance(after, dict)
        changed = {f"{node}.{key}" for key in after if before[key] != after[key]}
        assert {key for key in changed if not stated[key]} == set(), (
            "the line names the published key"
        )


def settings(text: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted key of each line of a YAML file, and its comment."""
    above: list[str] = []
    for line in text.splitlines():
        if found := re.match(r"( *)(\w+):[^#]*(?:# (.*))?$", line):
            above = [*above[: len(found[1]) // 2], found[2]]
            yield ".".join(above), found[3] or ""


def test_the_page_of_what_is_assumed_is_current() -> None:
    assert PAGE.read_text() == page(), "python -m tests.stand_ins"


@pytest.mark.parametrize("name", marked({*OF_EACH_KIND, *ONE_TASK}, NAMES))
def test_a_dry_run_says_that_it_fits(
    rlinf_vla: CommandLine, name: str, hub: Hub, tmp_path: Path
) -> None:
    plan = ["cluster.plan=given"] * (
        verb(name) == "train"
    )  # its search takes seconds: the next test
    found = rlinf_vla(verb(name), *of_simulator(name, tmp_path), "cluster=8gpu", *plan, "--dry-run")
    assert found.code == 0, found.out + found.err
    assert not fetched_weights(hub)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "repro_rl4vla_ppo",
        pytest.param("repro_rlinf_libero_130_grpo", marks=pytest.mark.nightly),
        "repro_pirl_pi05_maniskill_noise",
    ],
)
def test_a_dry_run_finds_a_plan(
    rlinf_vla: CommandLine, name: str, hub: Hub, tmp_path: Path
) -> None:
    found = rlinf_vla("train", *of_simulator(name, tmp_path), "cluster=8gpu", "--dry-run")
    assert found.code == 0 and "PREDICTED from published numbers" in found.out, (
        found.out + found.err
    )
    assert not fetched_weights(hub)


def fetched_weights(hub: Hub) -> bool:
    found = [
        request
        for request in hub.requests
        if "/resolve/" in request and re.search(r"\.safetensors$|\.pt$|/params/", request)
    ]
    return any(
        "_processor_step_" not in request and "normalizer_processor" not in request
        for request in found
    )


def check_an_iteration(rlinf_vla: CommandLine, name: str, tmp_path: Path, *others: str) -> None:
    keys = of_simulator(name, tmp_path)
    algorithm = str(compose.load("train", [f"recipe={name}", "cluster=laptop"]).algorithm.name)
    found = rlinf_vla(
        "train",
        *keys,
        f"run_dir={tmp_path}/run",
        "cluster=laptop",
        *TRAINING,
        *SMALL[algorithm],
        *others,
    )
    assert found.code == 0, found.out + found.err
    lines = read_metrics(tmp_path / "run")
    assert [line["rollout/steps"] > 0 for line in lines if "rollout/steps" in line] == [True]


@pytest.mark.slow
@pytest.mark.simulator
@pytest.mark.parametrize("name", marked(PLAYED_OFTEN))
def test_an_iteration_on_stand_ins(
    rlinf_vla: CommandLine, name: str, hub: Hub, tmp_path: Path
) -> None:
    check_an_iteration(rlinf_vla, name, tmp_path)


@pytest.mark.slow
@pytest.mark.simulator
@pytest.mark.parametrize("name", marked(ON_A_GPU))
def test_an_iteration_on_a_simulated_gpu(
    rlinf_vla: CommandLine, name: str, hub: Hub, tmp_path: Path, gpu: None
) -> None:
    check_an_iteration(rlinf_vla, name, tmp_path, "model.options.dtype=bfloat16")  # as published


@pytest.mark.slow
@pytest.mark.simulator
@pytest.mark.parametrize("name", marked({"repro_rlinf_libero_10_grpo_eval"}, ONE_TASK))
def test_an_evaluation_on_stand_ins(
    rlinf_vla: CommandLine, name: str, hub: Hub, tmp_path: Path
) -> None:
    keys = (
        *of_simulator(name, tmp_path),
        ONE_TASK[name],
        f"run_dir={tmp_path}/run",
        "cluster=laptop",
    )
    found = rlinf_vla("eval", *keys, *PLAYED)
    assert found.code == 0, found.out + found.err
    document = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [episode["seed"] for episode in document["episodes"]] == [0, 1]


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused_before_weights_are_fetched(
    rlinf_vla: CommandLine, what: str, hub: Hub, tmp_path: Path
) -> None:
    name, keys, words = WRONG[what]
    found = rlinf_vla(
        "train",
        *of_simulator(name, tmp_path),
        "cluster=8gpu",
        "cluster.plan=given",
        *keys.split(),
        "--dry-run",
    )
    assert words in found.complaint
    assert not fetched_weights(hub)


@pytest.mark.nightly
@pytest.mark.simulator
def test_the_commands_of_a_sheet_in_sequence(
    rlinf_vla: CommandLine, hub: Hub, tmp_path: Path
) -> None:
    """Training, evaluation and comparison, as docs/results/reproduction.md gives them, at a small size."""
    from tools.reproduction import commands

    name = "repro_pirl_pi0_10_ppo"
    of_simulator(name, tmp_path)
    train, evaluate, compare = (line.split()[1:] for line in commands("pirl_pi0", name, "ppo"))
    sizes = ("env.num_envs=2", "rollout.batch_size=2", "sweep.block=2")
    done = rlinf_vla(*train, "cluster=laptop", *TRAINING, *SMALL["ppo"])
    assert done.code == 0, done.out + done.err
    done = rlinf_vla(*evaluate, "env.tasks=[0]", "episodes=2", *sizes, "evaluation.filmed=0")
    assert done.code == 0, done.out + done.err
    done = rlinf_vla(*(word.replace("step_001000", "step_000001") for word in compare))
    assert done.code == 0 and "1 of 10 tasks" in done.out, done.out + done.err

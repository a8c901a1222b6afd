"""`rlinf-vla config`: the composed recipe, and where each value comes from."""

from __future__ import annotations

import functools
import json
from dataclasses import is_dataclass
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from rlinf_vla.cli import compose
from rlinf_vla.cli import config as config_command
from rlinf_vla.cli.config import COMMAND_LINE, DEFAULT, FILE, SAVED, Source, Value
from rlinf_vla.config.cluster import ClusterConfig
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.runtime.recipes import NODES, Configs
from rlinf_vla.runtime.run_directory import save_recipe
from tests.cli.conftest import CommandLine

ROOT = Path(__file__).parents[2]
PPO = "recipe=maniskill_ppo"
ON_LAPTOP = (PPO, "cluster=laptop")


def sources(*overrides: str) -> dict[str, Source]:
    return {each.key: each.source for each in config_command.values(overrides)}


# the truth


WITH_A_CHOICE = {"model.name", "model.checkpoint", "model.options", "reward.name", "reward.options"}
"""Keys that a choice sets itself, beside the defaults of its dataclass."""


@functools.cache
def written(file: str) -> dict[str, object]:
    """What a packaged file sets: key of the recipe -> value."""
    path = ROOT / file
    node = OmegaConf.load(path)
    assert isinstance(node, DictConfig)
    node.pop("defaults", None)
    prefix = "" if path.read_text().startswith("# @package _global_") else f"{path.parent.name}."
    return {
        f"{prefix}{key}": OmegaConf.to_container(parent, resolve=False)[name]
        for key, parent, name in config_command.leaves(node)
    }


@functools.cache
def by_default(source: Source) -> dict[str, object]:
    """The defaults of the schema, or of the dataclass of a choice."""
    group, _, choice = source.name.partition("=")
    if not group:
        nodes = {"": Recipe, "cluster.": ClusterConfig}
    else:
        nodes = {f"{NODES[group]}.": Configs(group)[choice], "": Recipe}
    found: dict[str, object] = {}
    for prefix, node in nodes.items():
        if is_dataclass(node):
            structured = OmegaConf.structured(node)
            found = {
                f"{prefix}{key}": config_command.value_of(parent, name)
                for key, parent, name in config_command.leaves(structured)
            } | found
    return found


@pytest.mark.parametrize(
    "name",
    ["maniskill_ppo_putonplate", "libero_grpo", "franka_dsrl", "genesis_eval", "reward_classifier"],
)
def test_each_value_stands_where_it_is_said_to(name: str) -> None:
    overrides = [f"recipe={name}", "cluster=laptop", "seed=3"]
    raw = compose.load("train", overrides)
    found = config_command.values(overrides)
    assert {each.source.kind for each in found} == {DEFAULT, FILE, COMMAND_LINE}
    for each in found:
        parent, _, last = each.key.rpartition(".")
        node = OmegaConf.select(raw, parent) if parent else raw
        composed = OmegaConf.to_container(node, resolve=False)[last]
        if each.source.kind == FILE:
            assert written(each.source.name)[each.key] == composed, each
        elif each.source.kind == DEFAULT and each.key not in WITH_A_CHOICE:
            assert by_default(each.source)[each.key] == composed, each


def test_the_last_of_several_files_is_shown() -> None:
    plain = sources(*ON_LAPTOP)
    other = sources(*ON_LAPTOP, "model=pi0")
    assert plain["iterations"] == Source(FILE, "recipes/recipe/maniskill_ppo.yaml")
    assert other["iterations"] == Source(FILE, "recipes/with/maniskill_ppo/pi0.yaml")
    assert other["env.task"] == Source(FILE, "recipes/task/pushcube.yaml")
    assert other["algorithm.gamma_unit"] == Source(DEFAULT, "algorithm=ppo")
    assert sources(PPO, "cluster=1gpu")["env.num_envs"] == Source(
        FILE, "recipes/scale/maniskill_ppo/1gpu.yaml"
    )
    preset = sources(
        "recipe=maniskill_ppo", "cluster=laptop", "preset=rl4vla", "algorithm.epochs=7"
    )
    assert preset["algorithm.gamma"] == Source(FILE, "recipes/preset/rl4vla.yaml")
    assert preset["algorithm.epochs"].name == "command line: algorithm.epochs=7"


def test_an_algorithm_that_varies_another_one() -> None:
    found = sources("recipe=maniskill_grpo", "cluster=laptop", "algorithm=dapo")
    assert found["algorithm.clip_high"] == Source(FILE, "recipes/algorithm/dapo.yaml")
    assert found["algorithm.name"] == Source(DEFAULT, "algorithm=grpo")


def test_an_override_of_a_whole_node() -> None:
    found = sources(
        *ON_LAPTOP, "cluster.roles={trainer:{cpus:2}}", "model.lora.targets=[q_proj,v_proj]"
    )
    assert (
        found["cluster.roles.trainer.cpus"].kind == found["model.lora.targets"].kind == COMMAND_LINE
    )
    assert found["cluster.roles.rollout.cpus"].kind == DEFAULT


def test_the_recipe_of_a_run(tmp_path: Path) -> None:
    save_recipe(tmp_path / "recipe.yaml", compose.load("train", ON_LAPTOP))
    found = sources(f"run={tmp_path}", "algorithm.gamma=0.5")
    assert found["env.task"] == found["algorithm.epochs"] == Source(SAVED, f"run={tmp_path}")
    assert found["algorithm.gamma"].kind == COMMAND_LINE


@pytest.mark.parametrize("name", ["mine", "my own (Läufe)", "that's mine", "100%20"])
def test_a_recipe_of_the_users(rlinf_vla: CommandLine, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    (folder / "recipe").mkdir(parents=True)
    text = "# @package _global_\ndefaults:\n  - maniskill_ppo\n  - _self_\nname: mine\nseed: 42\n"
    (folder / "recipe" / "mine.yaml").write_text(text)
    found = rlinf_vla("config", "seed", "iterations", "--config-dir", name, "recipe=mine")
    assert (
        f"{folder}/recipe/mine.yaml" in found.out
        and "recipes/recipe/maniskill_ppo.yaml" in found.out
    )
    assert (
        "nowhere: no such directory" in rlinf_vla("config", PPO, "--config-dir=nowhere").complaint
    )


# what is printed


def test_all_keys_are_shown_as_they_would_run(rlinf_vla: CommandLine) -> None:
    found = json.loads(rlinf_vla("config", *ON_LAPTOP, "--json").out)
    values = {each["key"]: each["value"] for each in found}
    config = OmegaConf.to_container(
        OmegaConf.create(rlinf_vla("train", *ON_LAPTOP, "--cfg", "job").out)
    )
    assert (
        isinstance(config, dict)
        and values["algorithm.horizon"] == config["algorithm"]["horizon"] == 120
    )
    assert found[0] == {
        "key": "name",
        "value": "maniskill_ppo",
        "source": {"kind": "file", "name": "recipes/recipe/maniskill_ppo.yaml"},
    }
    assert len(values) == len(found) == len(list(config_command.leaves(OmegaConf.create(config))))


def test_a_table_says_key_value_and_source(rlinf_vla: CommandLine) -> None:
    lines = rlinf_vla(
        "config", "algorithm.gamma", "lora", *ON_LAPTOP, "model.lora.vision=false"
    ).out.splitlines()
    cells = [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]
    assert ["algorithm.gamma", "0.97", "recipes/recipe/maniskill_ppo.yaml"] in cells
    assert ["model.lora.vision", "false", "command line: model.lora.vision=false"] in cells
    assert {row[0].rpartition(".")[0] for row in cells} == {"algorithm", "model.lora"}


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("checkpoints", {"checkpoints.every", "checkpoints.keep"}),
        ("checkpoints.keep", {"checkpoints.keep"}),
        ("horizon", {"algorithm.horizon"}),
        ("execution_horizon", {"control.execution_horizon", "rollout.deadline.execution_horizon"}),
    ],
)
def test_a_part_of_the_recipe(rlinf_vla: CommandLine, word: str, keys: set[str]) -> None:
    assert {
        each["key"] for each in json.loads(rlinf_vla("config", word, *ON_LAPTOP, "--json").out)
    } == keys


def test_a_wide_table_is_not_folded_in_a_pipe(
    rlinf_vla: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS")
    checkpoint = f"model.checkpoint=/{'x' * 200}"
    assert (
        f"command line: {checkpoint}"
        in rlinf_vla("config", "model.checkpoint", *ON_LAPTOP, checkpoint).out
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "config needs a recipe"),
        (["algorithm"], "config needs a recipe"),
        (["recipe=maniskil_ppo"], "did you mean recipe=maniskill_ppo?"),
        (
            ["gama", *ON_LAPTOP],
            "config gama: this recipe has no such key; did you mean algorithm.gamma?",
        ),
        (["zzz", *ON_LAPTOP], "without a KEY, config shows all"),
        ([*ON_LAPTOP, "algorithm.gama=1"], "did you mean algorithm.gamma?"),
        ([*ON_LAPTOP, "+new.key=1"], "new is not a key"),
        ([*ON_LAPTOP, "--jsn"], "--jsn: no such option (options: --json, --config-dir DIR)"),
    ],
)
def test_a_mistake(rlinf_vla: CommandLine, arguments: list[str], words: str) -> None:
    assert words in rlinf_vla("config", *arguments).complaint


def test_what_has_no_value_is_shown_as_such(rlinf_vla: CommandLine) -> None:
    found = json.loads(
        rlinf_vla("config", "model.checkpoint", "recipe=libero_grpo", "cluster=1gpu", "--json").out
    )
    assert [each["value"] for each in found] == ["???"]


def test_values_are_written_as_on_the_command_line() -> None:
    assert [
        config_command.told(each) for each in (None, True, 0.5, [1, "a"], {"b": None}, "text")
    ] == [
        "null",
        "true",
        "0.5",
        "[1,a]",
        "{b: null}",
        "text",
    ]
    assert str(Value("seed", 0, Source(DEFAULT, "")).source) == "default"

"""Published settings: each composes with its recipes, names the sources of its values, and runs at a tiny size."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from rlinf_vla.cli import compose
from rlinf_vla.cli import list as list_command
from rlinf_vla.config.recipe import PresetConfig
from rlinf_vla.core import plugins
from rlinf_vla.evaluation.evaluate import temperature_of
from rlinf_vla.runtime import recipes
from rlinf_vla.telemetry.metrics import read_metrics
from rlinf_vla.testing.toy_policy import LinearPolicy
from tests.cli.conftest import CommandLine, Counting

FOLDER = Path(str(files("rlinf_vla.recipes"))) / "preset"
PRESETS = list(list_command.recipe_names("preset"))
RECIPE_OF = {"ppo": "maniskill_ppo", "grpo": "maniskill_grpo", "sac": "maniskill_sac"}
TINY = {
    "openvla": ["model.checkpoint=asset://openvla_tiny", "model.options.prompt_length=26"],
    "openvla_oft": [
        "model.checkpoint=asset://openvla_oft_plus_tiny",
        "model.options.prompt_length=26",
    ],
    "pi0": ["model.checkpoint=asset://pi0_tiny", "model.options.prompt_length=16"],
    "compact": ["model.checkpoint=asset://compact"],
}
"""A policy of the same kind with random weights that fits counter world."""

SMALL = {
    "ppo": ["env.num_envs=2", "algorithm.horizon=6", "algorithm.minibatch_size=8"],
    "grpo": [
        "env.num_envs=2",
        "algorithm.episodes=4",
        "algorithm.group_size=2",
        "algorithm.minibatch_size=8",
    ],
    "sac": [
        "env.num_envs=2",
        "algorithm.episodes=2",
        "algorithm.batch_size=4",
        "algorithm.updates_per_step=0.2",
    ],
}
"""Sizes for which published runs need many GPUs; other values of a preset are unchanged."""

ONCE = [
    "iterations=1",
    "run_dir=run",
    "evaluation.before_and_after=false",
    "rollout.pipeline_depth=1",
    "cluster=laptop",
]
PACKAGED = plugins.models()


def composed(preset: str, model: str) -> DictConfig:
    """Composed on a recipe of its algorithm, which determines environment and checkpoint."""
    algorithm = header(preset).algorithm
    return compose.load(
        "train",
        [f"recipe={RECIPE_OF[algorithm]}", f"model={model}", f"preset={preset}", "cluster=laptop"],
    )


def header(preset: str) -> PresetConfig:
    """What a preset is declared for, possibly in the preset that it derives from."""
    document = OmegaConf.load(FOLDER / f"{preset}.yaml")
    bases = [each for each in document.get("defaults", []) if each != "_self_"]
    above = [OmegaConf.structured(header(base)) for base in bases]
    merged = OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(PresetConfig), *above, document.preset)
    )
    assert isinstance(merged, PresetConfig)
    return merged


def settings(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, dict):
            yield from settings(value, f"{prefix}{name}.")
        elif name != "defaults":
            yield f"{prefix}{name}", value


CASES = [(preset, model) for preset in PRESETS for model in header(preset).models]


def test_there_are_presets() -> None:
    assert len(PRESETS) == len(list(FOLDER.glob("*.yaml"))) >= 13
    assert {header(preset).algorithm for preset in PRESETS} == set(RECIPE_OF)


@pytest.mark.parametrize(("preset", "model"), CASES)
def test_it_composes_with_its_recipes(preset: str, model: str) -> None:
    config = composed(preset, model)
    found = recipes.read(config)
    assert (found.preset.name, found.preset.algorithm, found.model.name) == (
        preset,
        found.algorithm.name,
        model,
    )
    said = dict(settings(yaml.safe_load((FOLDER / f"{preset}.yaml").read_text())))
    assert said
    for key, value in said.items():
        if not str(value).startswith("${"):
            assert OmegaConf.select(config, key) == value, f"{key}: a later source overrides it"
    if found.algorithm.name == "ppo":
        assert found.algorithm.horizon % found.env.episode_limit == 0


def test_evaluations_sample_at_the_published_temperature() -> None:
    published = recipes.read(composed("rl4vla", "openvla"))
    ours = recipes.read(composed("pirl_flow_sde", "pi0"))
    assert (temperature_of(published, "sampled"), published.rollout.temperature) == (0.6, 1.0)
    assert temperature_of(published, "greedy") == temperature_of(ours, "greedy") == 0.0
    assert temperature_of(ours, "sampled") == ours.rollout.temperature


@pytest.mark.parametrize("preset", PRESETS)
def test_it_names_the_sources_of_its_values(preset: str) -> None:
    text = (FOLDER / f"{preset}.yaml").read_text()
    comments = " ".join(line[2:] for line in text.splitlines() if line.startswith("# "))
    assert re.search(r"Source of every value: .*\b[0-9a-f]{8}\b", comments), (
        "a repository at a commit"
    )
    assert "Not expressible" in comments and "Set by the task, not by the preset" in comments


@pytest.mark.parametrize("preset", PRESETS)
def test_the_list_and_the_page_name_it(rlinf_vla: CommandLine, preset: str) -> None:
    found = rlinf_vla("list", "presets")
    assert (
        found.code == 0
        and f" {preset} " in found.out
        and list_command.recipe_names("preset")[preset] in found.out
    )
    page = Path(__file__).parents[2] / "docs" / "presets.md"
    assert f"`{preset}`" in page.read_text()


@pytest.mark.parametrize(("preset", "model"), CASES)
def test_one_iteration_at_a_tiny_size(
    rlinf_vla: CommandLine,
    counting: Counting,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    preset: str,
    model: str,
) -> None:
    algorithm = header(preset).algorithm
    assert algorithm is not None
    monkeypatch.setattr(plugins, "models", lambda: dict(PACKAGED) | {"linear": LinearPolicy})
    monkeypatch.setattr("rlinf_vla.telemetry.report.write_report", lambda directory: directory)
    small = [
        *TINY[model],
        "model.options.random_weights=true",
        "env.state_dim=8",
        *SMALL[algorithm],
    ]
    small += ["algorithm.resample=1"] * (
        preset == "simplevla_rl"
    )  # it draws until a random policy succeeds
    found = rlinf_vla(
        *counting.arguments(
            "train", f"counting_{algorithm}", f"preset={preset}", f"model={model}", *small, *ONCE
        )
    )
    assert found.code == 0, found.out + found.err
    (line,) = read_metrics(tmp_path / "run")
    assert line["rollout/steps"] > 0 and ("critic/vf_loss" in line) == (algorithm != "grpo")
    written = OmegaConf.load(tmp_path / "run" / "recipe.yaml")
    assert (
        written.preset.name == preset and "${" not in (tmp_path / "run" / "recipe.yaml").read_text()
    )


# mismatches


@pytest.mark.parametrize(
    ("recipe_name", "preset"),
    [
        ("maniskill_grpo", "rl4vla"),
        ("maniskill_ppo", "simplevla_rl"),
        ("maniskill_ppo", "rlinf_sac"),
    ],
)
def test_a_preset_for_another_algorithm(
    rlinf_vla: CommandLine, recipe_name: str, preset: str
) -> None:
    complaint = rlinf_vla("train", f"recipe={recipe_name}", f"preset={preset}").complaint
    assert (
        complaint.startswith(f"preset={preset} does not fit")
        and "rlinf-vla list presets" in complaint
    )


@pytest.mark.parametrize(
    ("model", "preset"),
    [("pi0", "rl4vla"), ("openvla_oft", "rlinf_ppo_openvla"), ("openvla", "pirl_flow_sde")],
)
def test_a_preset_for_another_model(rlinf_vla: CommandLine, model: str, preset: str) -> None:
    complaint = rlinf_vla(
        "train", "recipe=maniskill_ppo", f"model={model}", f"preset={preset}"
    ).complaint
    assert complaint.startswith(f"preset={preset} ") and "rlinf-vla list presets" in complaint


def test_it_is_for_reinforcement_learning(rlinf_vla: CommandLine) -> None:
    assert rlinf_vla("train", "recipe=maniskill_sft", "preset=rl4vla").complaint.startswith(
        "preset=rl4vla does not fit"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["preset=rl4vl"], ["preset=rl4vl does not exist", "did you mean preset=rl4vla?"]),
        (
            ["preset=rl4vla", "algorithm.gama=1"],
            ["algorithm.gama is not a key; did you mean algorithm.gamma?"],
        ),
        (
            ["preset=rl4vla", "algorithm.group_size=8"],
            ["algorithm.group_size is not a key of the chosen env"],
        ),
        (
            ["preset=rl4vla", "env.episode_limit=null"],
            ["algorithm.horizon", "env.episode_limit must be a number", "not null"],
        ),
        (["algorithm.horizon=${nothing}"], ["algorithm.horizon", "nothing"]),
    ],
)
def test_a_wrong_key_with_a_preset(
    rlinf_vla: CommandLine, arguments: list[str], words: list[str]
) -> None:
    complaint = rlinf_vla("train", "recipe=maniskill_ppo", *arguments).complaint
    assert all(word in complaint for word in words), complaint


def test_the_command_line_overrides_a_preset() -> None:
    arguments = [
        "recipe=maniskill_ppo",
        "preset=rl4vla",
        "algorithm.learning_rate=0.5",
        "algorithm.horizon=90",
        "cluster=1gpu",
    ]
    found = recipes.read(compose.load("train", arguments))
    assert (found.algorithm.learning_rate, found.algorithm.horizon) == (0.5, 90)
    assert (found.algorithm.minibatch_size, found.env.num_envs) == (160, 64), (
        "a preset is not scaled to the cluster"
    )


@pytest.mark.parametrize(
    ("keys", "vision"),
    [
        ([], False),
        (["model=openvla_oft"], True),
        (["cluster=1gpu"], True),
        (["preset=rl4vla"], True),
        (["preset=rlinf_ppo_openvla"], True),
    ],
)
def test_only_the_laptops_openvla_has_frozen_towers(keys: list[str], vision: bool) -> None:
    assert (
        recipes.read(compose.load("train", ["recipe=maniskill_ppo", *keys])).model.lora.vision
        is vision
    )


def test_a_horizon_follows_the_episodes() -> None:
    found = recipes.read(
        compose.load(
            "train", ["recipe=maniskill_ppo", "preset=rlinf_ppo_openvla", "env.episode_limit=80"]
        )
    )
    assert found.algorithm.horizon == 160

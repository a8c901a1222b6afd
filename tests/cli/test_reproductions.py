"""Recipes of published runs, ``repro_*``: each composes, fits, and runs an iteration on stand-ins of what it names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlinf_vla.cli import compose
from rlinf_vla.cli import list as list_command
from rlinf_vla.runtime import recipes
from rlinf_vla.telemetry.metrics import read_metrics
from tests.cli.conftest import CommandLine
from tests.envs.scene25 import needs_recordings, published_folder
from tests.hub_server import Hub, serving
from tests.skips import needs
from tests.stand_ins import STAND_INS, files

NAMES = [name for name in list_command.recipe_names("recipe") if name.startswith("repro_")]
SMALL = {
    "ppo": ("algorithm.horizon=6", "algorithm.minibatch_size=4"),
    "grpo": ("algorithm.episodes=4", "algorithm.group_size=2", "algorithm.minibatch_size=4"),
}
"""Sizes for which published runs need eight GPUs, by algorithm."""
QUICK = (
    *("iterations=1", "episodes=2", "env.num_envs=2", "env.episode_limit=6", "env.backend=cpu", "rollout.batch_size=2"),
    *("model.options.dtype=float32", "evaluation.filmed=0", "cluster=laptop", "cluster.trainer_sharding=none", "env.processes=2"),
)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serving(monkeypatch, str(tmp_path / "client")) as server:
        for name in STAND_INS:
            server.holds("models", name, files(name))
        yield server


@pytest.mark.parametrize("name", NAMES)
def test_it_names_its_source_and_a_preset(name: str) -> None:
    config = compose.load("train", [f"recipe={name}", "cluster=8gpu"])
    recipe = recipes.read(config)
    assert recipe.name == name and recipe.preset.name, "its settings are those of a preset"
    preset = compose.load("train", [f"recipe={name}", "cluster=8gpu", f"preset={recipe.preset.name}"])
    changed = [key for key in ("algorithm", "rollout", "evaluation") if OmegaConf.select(config, key) != OmegaConf.select(preset, key)]
    assert changed == [], "the recipe changes what the preset sets"
    assert re.search(r"arXiv \d{4}\.\d{5}", list_command.recipe_names("recipe")[name])
    for repository in (recipe.model.checkpoint, recipe.model.lora.adapter):
        assert repository is None or repository.removeprefix("hf://") in STAND_INS


@needs_recordings
@needs("maniskill")
@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_says_that_it_fits(rlinf_vla: CommandLine, name: str, hub: Hub, tmp_path: Path) -> None:
    folder = published_folder(tmp_path)
    found = rlinf_vla("train", f"recipe={name}", f"env.asset_dir={folder}", "cluster=8gpu", "--dry-run")
    assert found.code == 0, found.out + found.err
    assert not any("/resolve/" in request and request.endswith(".safetensors") for request in hub.requests), "weights were fetched"


@pytest.mark.slow
@pytest.mark.simulator
@needs_recordings
@needs("maniskill")
@pytest.mark.parametrize("name", NAMES)
def test_an_iteration_on_stand_ins(rlinf_vla: CommandLine, name: str, hub: Hub, tmp_path: Path) -> None:
    folder = published_folder(tmp_path)
    algorithm = str(compose.load("train", [f"recipe={name}", "cluster=laptop"]).algorithm.name)
    found = rlinf_vla("train", f"recipe={name}", f"env.asset_dir={folder}", f"run_dir={tmp_path}/run", *QUICK, *SMALL[algorithm])
    assert found.code == 0, found.out + found.err
    lines = read_metrics(tmp_path / "run")
    assert [line["rollout/steps"] > 0 for line in lines if "rollout/steps" in line] == [True]

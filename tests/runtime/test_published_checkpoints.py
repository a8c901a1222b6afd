"""``recipe=libero_eval model=MODEL model.checkpoint=hf://ORG/NAME`` needs no further key, for every family with a card.

Small random models stand for the published ones, in their layout and under their names in a cache of the Hub.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from rlinf_vla.cli import compose
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.protocols import Convention, EnvSpec, Policy, ToolUnits
from rlinf_vla.envs.libero.conventions import native
from rlinf_vla.envs.libero.plugin import simulator_options
from rlinf_vla.models.cards import find_card
from rlinf_vla.models.openvla.cards import CARDS as openvla_cards
from rlinf_vla.models.pi0.cards import CARDS as pi0_cards
from rlinf_vla.runtime import recipes
from rlinf_vla.runtime.builders import build_policy
from rlinf_vla.runtime.fit import check_fit, fitted, remarks
from tests.models import test_cards, test_openpi
from tests.models.tiny_openvla import ASSETS
from tests.skips import require

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NUMBERS = {"state": 8, "actions": 7}
NORM_STATS = {
    name: {"mean": [0.1] * count, "std": [0.5] * count, "q01": [-1.0] * count, "q99": [1.0] * count}
    for name, count in NUMBERS.items()
}
Make = Callable[[Path, str], None]


def openvla(path: Path, repository: str) -> None:
    datasets = ("libero_spatial_no_noops", "libero_90_no_noops", "other")
    shutil.copytree(test_cards.cached(path.parent / "made", repository, datasets), path)


def openpi(path: Path, repository: str) -> None:
    """Converted by openpi's script, whose config.json names the sizes only."""
    document = json.loads((ASSETS / "pi0_tiny_libero" / "config.json").read_text())
    pi05 = "pi05" in repository
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(document | {"action_horizon": 10 if pi05 else 50}))
    (path / "physical-intelligence" / "libero").mkdir(
        parents=True
    )  # RLinf's place; openpi's is below assets
    (path / "physical-intelligence" / "libero" / "norm_stats.json").write_text(
        json.dumps({"norm_stats": NORM_STATS})
    )
    shutil.copyfile(ASSETS / "pi0_tiny" / "tokenizer.json", path / "tokenizer.json")
    save_file(
        {"time_mlp_in.weight" if pi05 else "state_proj.weight": torch.zeros(1)},
        path / "model.safetensors",
    )


def openpi_jax(path: Path, repository: str) -> None:
    require("openpi")
    test_openpi.directory(path, "pi05" if "pi05" in repository else "pi0")


def lerobot(path: Path, repository: str) -> None:
    """Its base models have no statistics: norm_stats.json is put beside them."""
    openpi(path, repository)
    document = json.loads((path / "config.json").read_text())
    del document["action_horizon"]
    lerobot = {
        "type": "pi05" if "pi05" in repository else "pi0",
        "chunk_size": 50,
        "n_action_steps": 50,
        "max_action_dim": 8,
    }
    (path / "config.json").write_text(json.dumps(document | lerobot))
    if "base" in repository:
        return
    shutil.rmtree(path / "physical-intelligence")
    features = {"observation.state": "state", "action": "actions"}
    for file, kind in (
        ("policy_preprocessor", "normalizer_processor"),
        ("policy_postprocessor", "unnormalizer_processor"),
    ):
        step = {
            "registry_name": kind,
            "config": {"norm_map": {"STATE": "MEAN_STD", "ACTION": "MEAN_STD"}},
            "state_file": f"{file}.safetensors",
        }
        (path / f"{file}.json").write_text(json.dumps({"steps": [step]}))
        state = {
            f"{theirs}.{name}": torch.tensor(NORM_STATS[ours][name])
            for theirs, ours in features.items()
            for name in ("mean", "std")
        }
        save_file(state, path / f"{file}.safetensors")


FAMILIES: list[tuple[str, str, Make, str]] = [
    ("openvla/openvla-7b-finetuned-libero-spatial", "openvla", openvla, "openvla_libero"),
    (
        "moojink/openvla-7b-oft-finetuned-libero-spatial",
        "openvla_oft",
        openvla,
        "openvla_oft_libero",
    ),
    ("Haozhan72/Openvla-oft-SFT-libero-spatial-traj1", "openvla_oft", openvla, "simplevla_libero"),
    ("RLinf/RLinf-OpenVLAOFT-LIBERO-90-Base", "openvla_oft", openvla, "rlinf_libero"),
    ("physical-intelligence/pi0_libero", "pi0", openpi_jax, "pi0_libero"),
    ("physical-intelligence/pi05_libero", "pi0", openpi_jax, "pi05_libero"),
    ("someone/pi05_libero_pytorch", "pi0", openpi, "pi05_libero"),
    ("RLinf/RLinf-Pi0-LIBERO-Spatial-Object-Goal-SFT", "pi0", openpi, "rlinf_pi0_libero"),
    ("RLinf/RLinf-Pi05-LIBERO-SFT", "pi0", openpi, "rlinf_pi05_libero"),
    ("lerobot/pi0_libero_finetuned", "pi0", lerobot, "lerobot_pi0_libero"),
    ("lerobot/pi05_libero_finetuned_v044", "pi0", lerobot, "lerobot_pi05_libero"),
    ("lerobot/pi0_libero_base", "pi0", lerobot, "lerobot_pi0_libero_base"),
    ("lerobot/pi05_libero_base", "pi0", lerobot, "lerobot_pi05_libero_base"),
]
"""Repository, model, how it is laid out, and its card."""


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(params=FAMILIES, ids=[repository for repository, *_ in FAMILIES])
def family(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str, str]:
    """Repository, model and card of a checkpoint in the cache."""
    repository, model, make, card = request.param
    folder = tmp_path / "hub" / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots").mkdir()
    make(folder / "snapshots" / COMMIT, repository)
    return repository, model, card


def opened(family: tuple[str, str, str], *keys: str) -> tuple[Recipe, Policy]:
    repository, model, _ = family
    named = [
        f"model={model}",
        f"model.checkpoint=hf://{repository}",
        "model.options.random_weights=true",
    ]
    recipe = recipes.read(compose.load("eval", ["recipe=libero_eval", *named, *keys]))
    return recipe, build_policy(recipe, lora=False)


def libero(recipe: Recipe, policy: Policy) -> EnvSpec:
    """What the recipe's LIBERO declares to this policy."""
    options = simulator_options(fitted(recipe.env, policy.spec))
    told: dict[str, Any] = native(options)
    images = dict.fromkeys(options["cameras"], (options["image_size"],) * 2)
    convention = Convention(**told | {"tool": ToolUnits(*told["tool"])})
    return EnvSpec(
        1,
        7,
        8,
        20.0,
        220,
        images,
        ("pick up the black bowl",),
        torch.device("cpu"),
        native=convention,
    )


def test_the_name_is_enough(family: tuple[str, str, str]) -> None:
    recipe, policy = opened(family)
    document: dict[str, Any] = policy.config if family[1] != "pi0" else policy.document  # type: ignore[assignment]
    assert document["card"] == family[2]
    spec = libero(recipe, policy)
    check_fit(policy, spec)
    assert (
        list(spec.images) == list(policy.spec.images)
        and policy.spec.convention.state == "axis_angle"
    )
    assert 1 < policy.spec.chunk <= 10 or family[2] in ("openvla_libero", "lerobot_pi0_libero")
    said = [line for line in remarks(policy.spec, spec) if line.startswith("card ")]
    assert (
        said == [f"card {family[2]} assumes: {line.partition(': ')[2]}" for line in said]
        and len(said) <= 1
    )


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("env.convention=common", "needs state as axis_angle|needs images as rot180"),
        (
            "env.gripper=plus_opens",
            r"gripper action means: \+1 closes, -1 opens; the environment's: \+1 opens",
        ),
        (
            "env.flip=upright",
            "needs images as rot180, the environment gives upright: with env=libero set env.convention=openvla",
        ),
        (
            "env.cameras=[frontview]",
            "needs image 'base', the environment has \\['frontview'\\]: set env.cameras",
        ),
    ],
)
def test_a_wrong_key_is_refused(family: tuple[str, str, str], key: str, words: str) -> None:
    recipe, policy = opened(family, key)
    with pytest.raises(UserError, match=words) as caught:
        check_fit(policy, libero(recipe, policy))
    assert "\n" not in str(caught.value)


def test_what_is_assumed_is_said(family: tuple[str, str, str]) -> None:
    recipe, policy = opened(family)
    lines = remarks(policy.spec, libero(recipe, policy))
    assumed = {
        "rlinf_libero",
        "lerobot_pi05_libero",
        "lerobot_pi0_libero_base",
        "lerobot_pi05_libero_base",
    }
    assert any("assumes" in line for line in lines) == (family[2] in assumed)


@pytest.mark.parametrize(
    ("repository", "model", "card"),
    [
        ("gen-robot/openvla-7b-rlvla-warmup", "openvla", "rl4vla_maniskill"),
        ("RLinf/RLinf-OpenVLAOFT-ManiSkill-Base-Main", "openvla_oft", "rlinf_maniskill"),
        ("Haozhan72/Openvla-oft-SFT-libero10-trajall", "openvla_oft", "simplevla_libero"),
        ("RLinf/RLinf-Pi0-LIBERO-Spatial-Object-Goal-SFT", "pi0", "rlinf_pi0_libero"),
        ("RLinf/RLinf-Pi05-LIBERO-SFT", "pi0", "rlinf_pi05_libero"),
    ],
)
def test_checkpoints_that_presets_start_from_have_cards(
    tmp_path: Path, repository: str, model: str, card: str
) -> None:
    cards = pi0_cards if model == "pi0" else openvla_cards
    found = find_card(
        cards, model, tmp_path / f"models--{repository.replace('/', '--')}", None, None, "openpi"
    )
    assert found is not None and found.name == card


def test_every_card_names_its_source() -> None:
    names = [card.name for card in (*pi0_cards, *openvla_cards)]
    assert len(set(names)) == len(names) and all(
        card.source for card in (*pi0_cards, *openvla_cards)
    )
    pages = "".join(
        (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text()
        for page in ("openvla", "pi0")
    )
    assert not [name for name in names if f"`{name}`" not in pages]


@pytest.mark.parametrize(
    "family",
    [each for each in FAMILIES if each[1] == "pi0"],
    ids=lambda each: each[0],
    indirect=True,
)
def test_lerobots_fine_tunes_do_not_get_openpis_settings(family: tuple[str, str, str]) -> None:
    _, policy = opened(family)
    assert isinstance(policy.delta, list)  # type: ignore[attr-defined]
    relative = family[2] in ("pi0_libero", "rlinf_pi0_libero", "lerobot_pi0_libero_base")
    assert policy.delta == ([0, 1, 2, 3, 4, 5] if relative else [])  # type: ignore[attr-defined]
    texts = policy.prompts.texts("push", torch.zeros(8))  # type: ignore[attr-defined]
    expected = f"Task: push, State: {' '.join(['128'] * 32)};\nAction: "
    assert texts == ([expected] if family[2] == "lerobot_pi05_libero" else ["push", "\n"])

"""An invalid config.json: one line that names the file and the key, before anything is built."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlinf_vla.config.errors import UserError
from rlinf_vla.core import plugins
from rlinf_vla.models.config_file import NODES, OPTIONAL, SHARES, SIZES
from rlinf_vla.runtime import recipes

ASSETS = {
    "compact": "compact",
    "openvla": "openvla_tiny",
    "openvla_oft": "openvla_oft_plus_tiny",
    "pi0": "pi0_tiny",
} | {
    "smolvla": "smolvla_tiny",
    "gr00t": "gr00t_tiny",
}
DOCUMENTS = {
    name: json.loads((recipes.asset_path(f"asset://{asset}") / "config.json").read_text())
    for name, asset in ASSETS.items()
}


def keys(node: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in node.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{name}.")


def without(model: str, key: str, value: Any, folder: Path) -> str:
    """The error message for this ``value`` at ``key`` of config.json."""
    directory = folder / model
    shutil.copytree(recipes.asset_path(f"asset://{ASSETS[model]}"), directory)
    document = json.loads(json.dumps(DOCUMENTS[model]))
    *above, last = key.split(".")
    node = document
    for name in above:
        node = node[name]
    node[last] = value
    (directory / "config.json").write_text(json.dumps(document))
    plugin = plugins.models()[model]
    with pytest.raises(UserError) as error:
        plugin.without_weights(directory, plugin.Config())
    assert "\n" not in str(error.value) and str(directory / "config.json") in str(error.value)
    return str(error.value)


NUMBERS = [
    (model, key)
    for model, document in DOCUMENTS.items()
    for key in keys(document)
    if key.rpartition(".")[2] in SIZES
]
PARTS = [
    (model, key)
    for model, document in DOCUMENTS.items()
    for key in keys(document)
    if key.rpartition(".")[2] in NODES
]


def test_the_sizes_are_known() -> None:
    """Each integer of our own files that determines a size."""
    other = {
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "empty_token_id",
        "proprio_dim",
    }
    other |= {
        "num_vlm_layers",
        "num_expert_layers",
        "self_attn_every_n_layers",
    }  # not positive: all of them, or none
    for document in DOCUMENTS.values():
        named = dict(zip(keys(document), values(document), strict=True))
        whole = {
            key.rpartition(".")[2]
            for key, value in named.items()
            if isinstance(value, int) and not isinstance(value, bool)
        }
        assert whole <= SIZES.keys() | SHARES.keys() | other


def values(node: dict[str, Any]) -> Iterator[Any]:
    for value in node.values():
        yield value
        if isinstance(value, dict):
            yield from values(value)


@pytest.mark.parametrize(("model", "key"), NUMBERS)
def test_a_size_is_bounded(model: str, key: str, tmp_path: Path) -> None:
    for i, value in enumerate((2**21, -1, 1.5, "many", None, math.nan)):
        if value is None and key.rpartition(".")[2] in OPTIONAL:
            continue  # another number determines it
        assert f"{key}={json.dumps(value)} is not valid" in without(
            model, key, value, tmp_path / str(i)
        )


@pytest.mark.parametrize(("model", "key"), PARTS)
def test_a_section_is_an_object(model: str, key: str, tmp_path: Path) -> None:
    for i, value in enumerate((None, 5)):
        assert f"{key}={json.dumps(value)} is not valid, an object is expected" in without(
            model, key, value, tmp_path / str(i)
        )


@pytest.mark.parametrize("low", [[0.0] * 7, [math.nan] * 8, [1.0] * 8, [[0.0]] * 8])
def test_an_invalid_range_of_the_state(low: list[Any], tmp_path: Path) -> None:
    assert "state_range" in without(
        "compact", "state_range", {"low": low, "high": [1.0] * 8}, tmp_path
    )


@pytest.mark.parametrize("model", ["openvla", "openvla_oft"])
def test_inconsistent_sizes(model: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(recipes.asset_path(f"asset://{ASSETS[model]}"), directory)
    document = DOCUMENTS[model] | {"vision_config": {"featurizer": {"embed_dim": 96}}}
    (directory / "config.json").write_text(json.dumps(document))
    plugin = plugins.models()[model]
    with pytest.raises(
        UserError, match=r"no model can be built from config\.json.*copy the checkpoint again"
    ) as error:
        plugin.without_weights(directory, plugin.Config())
    assert "\n" not in str(error.value)

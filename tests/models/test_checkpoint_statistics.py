"""Statistics of every model's checkpoint are finite, in order and of the right length, or refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf_vla.config.errors import UserError
from rlinf_vla.models.gr00t.options import GR00TOptions
from rlinf_vla.models.gr00t.policy import GR00TPolicy
from rlinf_vla.models.openvla.oft import OpenVLAOFTPolicy
from rlinf_vla.models.openvla.options import OpenVLAOFTOptions, OpenVLAOptions
from rlinf_vla.models.openvla.policy import OpenVLAPolicy
from rlinf_vla.models.pi0.options import Pi0Options
from rlinf_vla.models.pi0.policy import Pi0Policy
from rlinf_vla.models.smolvla.options import SmolVLAOptions
from rlinf_vla.models.smolvla.policy import SmolVLAPolicy
from tests.models import test_gr00t, test_pi0, test_smolvla
from tests.models.tiny_openvla import smaller_directory

Change = Callable[[list[Any]], list[Any]]
CHANGES: dict[str, tuple[Change, str]] = {
    "NaN": (lambda values: [float("nan"), *values[1:]], "has NaN or infinite numbers"),
    "infinite": (lambda values: [*values[:-1], float("inf")], "has NaN or infinite numbers"),
    "longer": (
        lambda values: [*values, 1.0],
        r"has \d+ numbers, \w+ has \d+|differ in length|has shape|has \d+ numbers",
    ),
    "text": (lambda values: ["a", *values[1:]], "is not a list of numbers"),
    "empty": (lambda values: [], "is not a list of numbers|differ in length"),
    "nested": (lambda values: [values], "is not a list of numbers|differ in length"),
}


def edited(path: Path, place: tuple[str, ...], change: Change) -> None:
    document = json.loads(path.read_text())
    node = document
    for part in place[:-1]:
        node = node[part]
    node[place[-1]] = change(node[place[-1]])
    path.write_text(json.dumps(document))


def openvla(path: Path, change: Change) -> None:
    edited(
        smaller_directory(path) / "dataset_statistics.json", ("maniskill", "action", "q99"), change
    )
    OpenVLAPolicy.load(path, OpenVLAOptions(random_weights=True))


def oft(path: Path, change: Change) -> None:
    edited(
        smaller_directory(path) / "dataset_statistics.json", ("maniskill", "proprio", "q01"), change
    )
    OpenVLAOFTPolicy.load(path, OpenVLAOFTOptions(random_weights=True, proprio=True))


def pi0(path: Path, change: Change) -> None:
    edited(test_pi0.directory(path) / "norm_stats.json", ("norm_stats", "actions", "std"), change)
    Pi0Policy.load(path, Pi0Options(random_weights=True))


def pi05(path: Path, change: Change) -> None:
    edited(
        test_pi0.directory(path, pi05=True) / "norm_stats.json",
        ("norm_stats", "state", "q99"),
        change,
    )
    Pi0Policy.load(path, Pi0Options(random_weights=True))


def gr00t(path: Path, change: Change) -> None:
    edited(
        test_gr00t.directory(path) / "experiment_cfg" / "metadata.json",
        ("new_embodiment", "statistics", "action", "arm", "max"),
        change,
    )
    GR00TPolicy.load(path, GR00TOptions(random_weights=True))


@pytest.mark.parametrize("kind", list(CHANGES))
@pytest.mark.parametrize("load", [openvla, oft, pi0, pi05, gr00t])
def test_statistics_that_are_no_numbers_are_refused(
    tmp_path: Path, load: Callable[[Path, Change], None], kind: str
) -> None:
    load(tmp_path / "unchanged", lambda values: values)
    change, words = CHANGES[kind]
    with pytest.raises(UserError, match=words) as caught:
        load(tmp_path / "changed", change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("load", [openvla, pi05, gr00t])
def test_bounds_in_the_wrong_order_are_refused(
    tmp_path: Path, load: Callable[[Path, Change], None]
) -> None:
    with pytest.raises(UserError, match=r"(q01|min)=[-.\d]+ is above (q99|max)=-99 in dimension 1"):
        load(tmp_path / "model", lambda values: [values[0], -99.0, *values[2:]])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "NaN or infinite"),
        (float("inf"), "NaN or infinite"),
        (-1.0, "std has negative"),
    ],
)
def test_statistics_in_processors_are_refused(tmp_path: Path, value: float, words: str) -> None:
    path = test_smolvla.directory(tmp_path / "small")
    (file,) = path.glob("policy_postprocessor*.safetensors")
    numbers = load_file(file)
    numbers["action.std"] = torch.cat([torch.tensor([value]), numbers["action.std"][1:]])
    save_file(numbers, file)
    with pytest.raises(UserError, match=words):
        SmolVLAPolicy.load(path, SmolVLAOptions(random_weights=True))


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([1, 1, 1, 0], "mask must be a list of true and false: write true for 1 and false for 0"),
        ("yes", "mask must be a list of true and false"),
        ([True, False], "mask has 2 entries, the other statistics have 4"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(tmp_path: Path, mask: Any, words: str) -> None:
    path = smaller_directory(tmp_path / "small")
    edited(path / "dataset_statistics.json", ("maniskill", "action", "mask"), lambda values: mask)
    with pytest.raises(UserError, match=f"statistics of maniskill, action: {words}"):
        OpenVLAPolicy.load(path, OpenVLAOptions(random_weights=True))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_fused_vision_backbone", False),
        ("vision_backbone_id", "siglip-vit-so400m"),
        ("timm_model_ids", ["vit_so400m_patch14_siglip_224"]),
        ("timm_override_act_layers", ["quick_gelu"]),
        ("llm_backbone_id", "mistral-v0.1-7b-pure"),
    ],
)
def test_an_openvla_of_other_parts_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    path = smaller_directory(tmp_path / "small")
    document = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(document | {key: value}))
    with pytest.raises(
        UserError,
        match=rf"config\.json: {key}=.* is not supported, .* is: choose another model\.checkpoint",
    ):
        OpenVLAPolicy.load(path, OpenVLAOptions(random_weights=True))

"""Full-size networks have exactly the published keys and shapes (built on the meta device)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from rlinf_vla.models.openvla.prismatic import PrismaticVLA
from rlinf_vla.models.pi0.gemma import GEMMA
from rlinf_vla.models.pi0.network import PALIGEMMA_VOCABULARY, SIGLIP, Pi0Config, Pi0Network
from rlinf_vla.models.pi0.openpi import UNUSED_HEAD, layout

from . import openpi_jax
from .fixtures import ROOT

JAX_SIZES = {
    "WIDTH": 2048,
    "EXPERT": 1024,
    "HEADS": 8,
    "KV_HEADS": 1,
    "HEAD": 256,
    "MLP": 16384,
    "EXPERT_MLP": 4096,
    "DEPTH": 18,
    "VISION": 1152,
    "VISION_HEADS": 16,
    "VISION_MLP": 4304,
    "VISION_DEPTH": 27,
    "PATCH": 14,
    "PATCHES": 256,
    "VOCABULARY": 257152,
    "ACTIONS": 32,
}


def manifest(name: str) -> Any:
    return json.loads((ROOT / "manifests" / name).read_text())


def shapes(module: torch.nn.Module) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in module.state_dict().items()}


def test_openvla_7b() -> None:
    with torch.device("meta"):
        network = PrismaticVLA(manifest("openvla_7b_config_reconstructed.json"))
    assert shapes(network) == manifest("openvla_7b_keys.json")


@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_pi0(name: str) -> None:
    config = Pi0Config(
        GEMMA["gemma_2b"],
        GEMMA["gemma_300m"],
        SIGLIP,
        PALIGEMMA_VOCABULARY,
        32,
        50,
        pi05=name == "pi05",
    )
    with torch.device("meta"):
        network = Pi0Network(config)
    assert shapes(network) == {
        key: shape for key, (shape, _) in manifest(f"{name}_openpi_pytorch_keys.json").items()
    }


@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_full_size_arrays_of_jax_become_all_published_tensors(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for each, size in JAX_SIZES.items():
        monkeypatch.setattr(openpi_jax, each, size)
    found = {}
    for jax, shape in openpi_jax.shapes(name == "pi05").items():
        array = torch.empty(shape, device="meta")
        for ours, change in layout(name == "pi05")[jax].items():
            for layer in range(len(array)) if "{}" in ours else [None]:
                found[ours.format(layer)] = list(
                    change(array if layer is None else array[layer]).shape
                )
    published = {
        key: shape
        for key, (shape, _) in manifest(f"{name}_openpi_pytorch_keys.json").items()
        if key != UNUSED_HEAD
    }
    assert found == published

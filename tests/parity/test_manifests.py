"""Full-size networks have exactly the published keys and shapes (built on the meta device)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from rlinf_vla.models.openvla.prismatic import PrismaticVLA
from rlinf_vla.models.pi0.gemma import GEMMA
from rlinf_vla.models.pi0.network import PALIGEMMA_VOCABULARY, SIGLIP, Pi0Config, Pi0Network

from .fixtures import ROOT


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
    config = Pi0Config(GEMMA["gemma_2b"], GEMMA["gemma_300m"], SIGLIP, PALIGEMMA_VOCABULARY, 32, 50, pi05=name == "pi05")
    with torch.device("meta"):
        network = Pi0Network(config)
    assert shapes(network) == {key: shape for key, (shape, _) in manifest(f"{name}_openpi_pytorch_keys.json").items()}

"""Outputs of the official implementations on tiny random models: one folder each, with sizes in its config.json.

``PARITY_FIXTURES`` names another set of the same layout.
"""

from __future__ import annotations

import gzip
import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load
from torch import Tensor

EMPTY = 29871
"""Llama's empty token, in which OpenVLA's prompts end."""

ROOT = Path(os.environ.get("PARITY_FIXTURES") or Path(__file__).with_name("fixtures"))


class Arrays(dict[str, Tensor]):
    """The arrays of an .npz file; records which ones a test has read."""

    def __init__(self, path: Path) -> None:
        stored = np.load(path)
        super().__init__(
            {
                name: torch.from_numpy(stored[name])
                for name in stored.files
                if stored[name].dtype.kind != "U"
            }
        )
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.used.add(name)
        return super().__getitem__(name)


class Fixture:
    def __init__(self, name: str) -> None:
        self.path = ROOT / name

    def json(self, name: str) -> Any:
        return json.loads((self.path / name).read_text())

    @cached_property
    def config(self) -> dict[str, Any]:
        config = self.json("config.json")
        if "oracle_vit" in config:
            pooled = any(".attn_pool." in name for name in self.weights)
            towers = config["oracle_vit"]
            config["vision_config"] = towers | {
                "fused_featurizer": towers["fused_featurizer"] | {"attn_pool": pooled}
            }
        return config

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Official names; computed with in float32 from these bf16 values."""
        return self.tensors("weights.safetensors.gz")

    def tensors(self, name: str) -> dict[str, Tensor]:
        with gzip.open(self.path / name) as file:
            return {key: value.float() for key, value in load(file.read()).items()}

    def component(self, name: str) -> dict[str, Tensor]:
        """One of OFT's ``NAME--STEP_checkpoint.pt``."""
        stored = torch.load(next(self.path.glob(f"{name}--*_checkpoint.pt")), weights_only=True)
        return {key.removeprefix("module."): value.float() for key, value in stored.items()}

    @cached_property
    def inputs(self) -> Arrays:
        return Arrays(self.path / "inputs.npz")

    @cached_property
    def expected(self) -> Arrays:
        return Arrays(self.path / "expected.npz")


def prompts(fixture: Fixture) -> list[Tensor]:
    """Ids ``[1, L]`` of every sample of OpenVLA, ending in the empty token."""
    rows: list[Tensor] = []
    while f"prompt_ids_{len(rows)}" in fixture.inputs:
        rows.append(closed(fixture.inputs[f"prompt_ids_{len(rows)}"]))
    return rows


def closed(ids: Tensor) -> Tensor:
    return (ids if ids[-1] == EMPTY else F.pad(ids, (0, 1), value=EMPTY))[None]


def difference(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float((actual.double() - expected.double()).abs().max())

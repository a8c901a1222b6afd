"""The variants of GRPO in recipes/algorithm, as dataclasses."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from omegaconf import OmegaConf

from rlinf_vla.algorithms.grpo import GRPOConfig


def _read(text: str) -> Any:
    values = OmegaConf.create(text)
    assert values.pop("defaults") == ["grpo", "_self_"]
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(GRPOConfig), values))


VARIANTS: dict[str, GRPOConfig] = {
    path.name.removesuffix(".yaml"): _read(path.read_text())
    for path in (files("rlinf_vla.recipes") / "algorithm").iterdir()
}

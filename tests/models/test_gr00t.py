from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.models.gr00t.network import GR00TNetwork
from rlinf_vla.models.gr00t.policy import GR00TOptions, GR00TPolicy
from rlinf_vla.testing.policy import PolicyConformance
from rlinf_vla.testing.policy_calls import act, gradients, observations
from tests.models.frozen_part import assert_computed_once
from tests.models.test_smolvla import edit
from tests.models.tiny_openvla import ASSETS
from tools.tiny_checkpoints import write_gr00t

TINY = ASSETS / "gr00t_tiny"
EAGLE = {
    "text_config": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    "vision_config": {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 32},
}
HEAD = {
    "action_dim": 6,
    "hidden_size": 20,
    "diffusion_model_cfg": {"attention_head_dim": 8, "num_attention_heads": 3, "num_layers": 3, "output_dim": 20},
    "vl_self_attention_cfg": {"attention_head_dim": 8},
}


def directory(path: Path, **head: Any) -> Path:
    """A checkpoint without weights: 32-pixel images, two layers of text, a horizon of four actions of six numbers."""
    write_gr00t(path)
    edit(path / "config.json", {"backbone_cfg": {"select_layer": 2}, "action_head_cfg": {"action_dim": 6, "hidden_size": 20}})
    document = json.loads((path / "config.json").read_text())
    for name, value in (HEAD | head).items():
        node = document["action_head_cfg"]
        node[name] = node[name] | value if isinstance(value, dict) else value
    (path / "config.json").write_text(json.dumps(document))
    edit(path / "eagle_config.json", EAGLE)
    return path


def small(path: Path, **options: Any) -> GR00TPolicy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = {"denoise_steps": 3, "frozen_vlm": False, "prompt_length": 56} | options
        return GR00TPolicy.load(directory(path), GR00TOptions(random_weights=True, **options))


class GR00T(PolicyConformance):
    continuous = True
    state_numbers = 8
    options: dict[str, Any] = {}  # noqa: RUF012

    @pytest.fixture
    def policy(self, tmp_path: Path) -> GR00TPolicy:
        return small(tmp_path / "small", **self.options)

    def reload(self, policy: Any, directory: Path) -> GR00TPolicy:
        directory.mkdir()
        policy.save(directory)
        return GR00TPolicy.load(directory, replace(policy.options, random_weights=False))


class TestGR00T(GR00T):
    pass


class TestGR00TWholeChain(GR00T):
    options = {"sampler": "flow_sde_all", "value_on": "vlm", "chunk": 2}  # noqa: RUF012


class TestGR00TFlowNoise(GR00T):
    options = {"sampler": "flow_noise", "frozen_vlm": True}  # noqa: RUF012

    test_save_and_load = None  # type: ignore[assignment]  # a training checkpoint keeps the noise head; the model's own layout has no place for it

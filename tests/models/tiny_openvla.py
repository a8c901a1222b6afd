"""OpenVLA in two small sizes for tests: the packaged tiny one, and a smaller one."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from rlinf_vla.models.openvla.options import OpenVLAOptions
from rlinf_vla.models.openvla.policy import OpenVLAPolicy

ASSETS = Path(str(files("rlinf_vla.assets")))
ASSET, OFT_PLUS = ASSETS / "openvla_tiny", ASSETS / "openvla_oft_plus_tiny"


def tiny(seed: int = 0, directory: Path = ASSET, **options: Any) -> OpenVLAPolicy:
    """Random weights by ``seed``, the value head's too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return OpenVLAPolicy.load(directory, OpenVLAOptions(random_weights=True, **options))


def smaller_config() -> dict[str, Any]:
    """Eight action bins, 32-pixel images, 2 layers; a pooling head as SigLIP has it; chunks of two actions."""
    config = json.loads((ASSET / "config.json").read_text())
    tower = {
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 2,
        "patch_size": 16,
        "img_size": 32,
        "mlp_ratio": 2.0,
    }
    config["vision_config"] = {
        "featurizer": tower | {"class_token": True, "reg_tokens": 4, "layer_scale": True},
        "fused_featurizer": tower | {"attn_pool": True},
    }
    config["text_config"] |= {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config["text_config"] |= {"num_key_value_heads": 2, "initializer_range": 0.15}
    return config | {"image_sizes": [32, 32], "n_action_bins": 8, "chunk": 2}


def smaller_directory(directory: Path, config: dict[str, Any] | None = None) -> Path:
    """An OpenVLA checkpoint without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "dataset_statistics.json"):
        shutil.copyfile(ASSET / name, directory / name)
    (directory / "config.json").write_text(json.dumps(config or smaller_config()))
    return directory

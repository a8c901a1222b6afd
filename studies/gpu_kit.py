"""What the parts of studies/prove_gpu.py share: recipes, policies and the rows of the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import torch
from prove_gpu import ROOT, write

from rlinf_vla.cli import compose
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.protocols import Policy
from rlinf_vla.runtime import builders, recipes

PI0 = (
    "model.options.images=[base,wrist]",
    "model.options.frozen_vlm=false",
    "model.options.denoise_steps=10",
)
MODELS = {
    "openvla": ("model=openvla", "model.options.prompt_length=32"),
    "oft": (
        "model=openvla_oft",
        "model.options.chunk=8",
        "model.options.images=[base,wrist]",
        "model.options.prompt_length=32",
    ),
    "pi0": ("model=pi0", *PI0, "model.options.prompt_length=48"),
    "pi05": ("model=pi0", *PI0, "model.options.prompt_length=200"),
}
OFFICIAL = {"openvla": "openvla_7b", "oft": "openvla_7b", "pi0": "pi0_3b", "pi05": "pi05_3b"}
TINY = {
    "openvla": "openvla_tiny",
    "oft": "openvla_oft_tiny_pushcube",
    "pi0": "pi0_tiny",
    "pi05": "pi0_tiny",
}


def said(value: float, unit: str, goal: float | None = None, least: bool = True) -> tuple[str, str]:
    """Return a measurement and its goal, ``least`` or most, as two columns of the page."""
    number = f"{value:.4g}{unit}"
    if goal is None:
        return number, ""
    met = value >= goal if least else value <= goal
    return f"**{number}**", f"{'≥' if least else '≤'} {goal:g}{unit}: {'met' if met else 'missed'}"


class Kit:
    """Makes recipes and policies for a part, and stores its rows at once."""

    def __init__(self, device: str, size: str, seconds: float, file: Path, folder: Path) -> None:
        """``seconds``: of one measurement of latencies. ``folder``: for files of this part."""
        self.device = torch.device(device)
        self.tiny = size == "tiny"
        self.seconds = seconds
        self.file = file
        self.folder = folder
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        self.rows: list[Sequence[str]] = []
        self.document = json.loads(file.read_text()) | {
            "machine": f"{name}, torch {torch.__version__}",
            "rows": self.rows,
        }

    def add(self, what: str, measured: str, goal: str = "") -> None:
        self.rows.append((what, measured, goal))
        write(self.file, self.document)
        print(what, measured, goal, flush=True)

    def recipe(self, model: str, *keys: str) -> Recipe:
        """Return a recipe of PPO for the model, at its official or a tiny size."""
        if self.tiny:
            directory = self.folder / f"{model}-tiny"
            if not directory.exists():
                directory.mkdir()
                for path in (ROOT / "assets" / TINY[model]).iterdir():
                    (directory / path.name).write_bytes(path.read_bytes())
                if model == "pi05":
                    config = json.loads((directory / "config.json").read_text())
                    (directory / "config.json").write_text(json.dumps(config | {"pi05": True}))
        else:
            directory = ROOT / "assets" / OFFICIAL[model]
        size = [
            "cluster=laptop",
            f"cluster.device={self.device.type}",
            "cluster.micro_batch_size=1",
        ]
        network = [
            f"model.checkpoint={directory}",
            "model.options.random_weights=true",
            *MODELS[model],
        ]
        dtype = "float32" if self.tiny else "bfloat16"
        network += ["model.options.denoise_steps=2"] if self.tiny and "pi" in model else []
        return recipes.read(
            compose.load(
                "train",
                ["recipe=maniskill_ppo", *network, *size, f"model.options.dtype={dtype}", *keys],
            )
        )

    def policy(self, recipe: Recipe) -> Policy:
        """Build the policy; large networks on the GPU, where random numbers take no minutes."""
        where = "cpu" if self.tiny else self.device.type
        with patch("rlinf_vla.models.files.build_device", lambda _: torch.device(where)):
            return builders.build_policy(recipe)

    @property
    def peak(self) -> str:
        return (
            f"; peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB"
            if self.device.type == "cuda"
            else ""
        )

"""Image encoder of the compact models: convolutions on patches, or any backbone of timm."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_vla.config.errors import UserError

FAR_MM = 2000
"""Distances from here on are not told apart."""


class ImageEncoder(nn.Module):
    """Encode a picture as ``[B, width]`` in (-1, 1): colours uint8 ``[B, H, W, 3]``, or distances
    int16 ``[B, H, W, 1]`` as a grey picture."""

    def __init__(self, config: dict[str, Any], encoder: str) -> None:
        """``config``: image_sizes, width; for conv patch, channels. ``encoder``: conv or timm:NAME.

        Raises UserError if the encoder is unknown or timm is not installed.
        """
        super().__init__()
        self.network = _network(config, encoder)
        with torch.no_grad():
            self.network.eval()
            features = self.network(torch.zeros(1, 3, *config["image_sizes"])).shape[-1]
            self.network.train()
        self.project = nn.Sequential(
            nn.Linear(features, config["width"]), nn.LayerNorm(config["width"]), nn.Tanh()
        )

    def forward(self, image: Tensor) -> Tensor:
        shades = image.permute(0, 3, 1, 2).float()
        if image.dtype == torch.uint8:
            shades = shades / 255
        else:
            shades = (shades / FAR_MM).clamp(max=1)
        return self.project(self.network(shades.expand(-1, 3, -1, -1) - 0.5))


def _network(config: dict[str, Any], encoder: str) -> nn.Module:
    if encoder == "conv":
        stem, *channels = config["channels"]
        layers: list[nn.Module] = [
            nn.Conv2d(3, stem, config["patch"], stride=config["patch"]),
            nn.ReLU(),
        ]
        for before, after in pairwise([stem, *channels]):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten())
    if not encoder.startswith("timm:"):
        raise UserError(f"model.options.encoder={encoder}: choose conv or timm:NAME")
    try:
        import timm
    except ImportError:
        raise UserError(
            f"{encoder}: timm is not installed; it brings the torchvision that matches your torch: "
            'pip install "rlinf-vla[timm]"'
        ) from None
    name = encoder.removeprefix("timm:")
    if name not in timm.list_models():
        raise UserError(f"model.options.encoder={encoder}: timm has no model {name!r}")
    return timm.create_model(name, pretrained=False, num_classes=0)

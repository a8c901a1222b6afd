"""Eagle 2.5 VL, cut at a layer, under the state-dict names of GR00T N1.5.

Source: NVIDIA Isaac-GR00T ``backbone/eagle2_hg_model/modeling_eagle2_5_vl.py`` (as in lerobot
0.4.4). The vision tower and the layers of Qwen3 are those of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..siglip import VisionTower


@dataclass(frozen=True)
class EagleConfig:
    text: dict[str, Any]
    """``text_config`` of Eagle's config.json; only the first ``layers`` are built."""
    vision: dict[str, Any]
    layers: int
    shuffle: int
    """Patches per side that become one token."""
    connector_layers: int
    project_to: int | None
    """Width of the features; None: that of the language model."""

    @property
    def width(self) -> int:
        return self.project_to or self.text["hidden_size"]

    @property
    def image_tokens(self) -> int:
        return (self.vision["image_size"] // self.vision["patch_size"] // self.shuffle) ** 2


def connector(config: EagleConfig) -> nn.Sequential:
    patch = config.vision["hidden_size"] * config.shuffle**2
    width = config.text["hidden_size"]
    if config.connector_layers == 1:
        return nn.Sequential(nn.Linear(patch, width))
    return nn.Sequential(
        nn.LayerNorm(patch), nn.Linear(patch, width), nn.GELU(), nn.Linear(width, width)
    )


class Eagle(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        from transformers import Qwen3Config, Qwen3Model
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

        super().__init__()
        self.shuffle = config.shuffle
        self.vision_model = VisionTower(config.vision)
        rope = {"rope_type": "default", "rope_theta": config.text["rope_theta"]}
        sizes = {name: value for name, value in config.text.items() if name != "rope_theta"} | {
            "num_hidden_layers": config.layers
        }
        text = Qwen3Config(**(sizes | {"rope_parameters": rope, "attn_implementation": "sdpa"}))
        self.language_model = nn.ModuleDict({"model": Qwen3Model(text)})
        with torch.device("cpu"):  # computed, not loaded: must not be on meta while the weights are
            self.language_model["model"].rotary_emb = Qwen3RotaryEmbedding(text)
        self.mlp1 = connector(config)

    def forward(self, pixels: Tensor, token_ids: Tensor, places: Tensor) -> Tensor:
        """Return states ``[B, N, width]``, undefined behind the end of a row's text.

        ``pixels``: float ``[B, I, 3, H, W]`` in [-1, 1]; ``token_ids``: int64 ``[B, N]``, padded on
        the right; ``places``: int64 ``[I * image_tokens]``, which of the N are of images.
        """
        model: Any = self.language_model["model"]
        x = self.embed(pixels, token_ids, places)
        # attention is causal, so that nothing attends to padding
        order = torch.arange(x.shape[1], device=x.device)
        mask = torch.zeros(len(order), len(order), dtype=x.dtype, device=x.device).masked_fill_(
            order > order[:, None], float("-inf")
        )
        rotations = model.rotary_emb(x, position_ids=order[None])
        for layer in model.layers:
            x = layer(x, attention_mask=mask[None, None], position_embeddings=rotations)
        return model.norm(x)

    def embed(self, pixels: Tensor, token_ids: Tensor, places: Tensor) -> Tensor:
        model: Any = self.language_model["model"]
        text = model.embed_tokens(token_ids)
        patches = self.vision_model(pixels.to(text.dtype).flatten(0, 1))
        images = self.mlp1(self._shuffled(patches)).unflatten(0, pixels.shape[:2]).flatten(1, 2)
        return text.index_copy(1, places, images)

    def _shuffled(self, patches: Tensor) -> Tensor:
        """Join squares of neighbouring patches ``[B, P, d]``: ``[B, P / s**2, d s**2]``."""
        side = int(patches.shape[1] ** 0.5)
        s = self.shuffle
        squares = patches.unflatten(1, (side // s, s, side // s, s))
        return squares.permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(1, 2)

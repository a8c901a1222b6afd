"""The vision tower of models that read SigLIP's patches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class VisionTower(nn.Module):
    """transformers' SigLIP, under the name prefix of openpi and of Eagle."""

    def __init__(self, config: dict[str, Any]) -> None:
        from transformers import SiglipVisionConfig, SiglipVisionModel

        super().__init__()
        sizes = {key: value for key, value in config.items() if key != "projection_dim"}
        siglip = SiglipVisionConfig(
            **sizes, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6, vision_use_head=False
        )
        siglip._attn_implementation = "sdpa"
        self.vision_model = SiglipVisionModel(siglip)
        embeddings = self.vision_model.embeddings
        with torch.device("cpu"):  # computed, not loaded: must not be on meta while the weights are
            embeddings.register_buffer(
                "position_ids", torch.arange(embeddings.num_positions)[None], persistent=False
            )

    def forward(self, pixels: Tensor) -> Tensor:
        """Return patch features; the embeddings may be more precise than the rest, as in openpi."""
        siglip = self.vision_model
        embedded = siglip.embeddings(pixels).to(siglip.post_layernorm.weight.dtype)
        return siglip.post_layernorm(siglip.encoder(inputs_embeds=embedded).last_hidden_state)

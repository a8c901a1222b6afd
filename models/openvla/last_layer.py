"""A Llama's last layer, computed for the last tokens only: no other states are read."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from ..rotation import rotate
from .cache import without_cudnn_attention


class LastLayer(LlamaDecoderLayer):
    def forward(
        self, hidden_states: Tensor, *positional: Any, rows: int | None = None, **others: Any
    ) -> Tensor:
        """Return the states ``[B, rows, d]`` of the last ``rows`` tokens, all without ``rows``."""
        if rows is None:
            return super().forward(hidden_states, *positional, **others)
        attention: Any = self.self_attn

        def heads(projection: nn.Module, x: Tensor) -> Tensor:
            return projection(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

        cos, sin = (
            angles[:, None, :, : attention.head_dim // 2]
            for angles in others["position_embeddings"]
        )
        normed = self.input_layernorm(hidden_states)
        queries = rotate(
            heads(attention.q_proj, normed[:, -rows:]), cos[:, :, -rows:], sin[:, :, -rows:]
        )
        keys = rotate(heads(attention.k_proj, normed), cos, sin)
        values = heads(attention.v_proj, normed)
        if (cache := others.get("past_key_values")) is not None:
            keys, values = cache.update(keys, values, attention.layer_idx)
        bias = others["attention_mask"][:, :, -rows:]
        with without_cudnn_attention():
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=bias, enable_gqa=attention.num_key_value_groups > 1
            )
        x = hidden_states[:, -rows:] + attention.o_proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


def end_with_last_layer(model: Any) -> None:
    """Make the last layer of a ``LlamaModel`` accept ``rows``; names and weights stay."""
    model.layers[-1].__class__ = LastLayer

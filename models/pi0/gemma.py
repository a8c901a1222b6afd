"""Gemma layers that can attend to another stream's keys and values, with optional adaRMS.

Source: openpi ``models_pytorch/gemma_pytorch.py`` and its patched transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf_vla.core.devices import computes_on_cuda

from .. import fused
from ..flow_network import (
    KeysAndValues,
    additive_mask,
    few_queries_attention,
    rotate_both,
    rotations,
)


@dataclass(frozen=True)
class GemmaConfig:
    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


GEMMA = {
    "gemma_300m": GemmaConfig(1024, 18, 4096, 8, 1, 256),
    "gemma_2b": GemmaConfig(2048, 18, 16384, 8, 1, 256),
}
"""Sizes by openpi's variant names."""


class RMSNorm(nn.Module):
    """Gemma's RMS norm: in float32, scaled by ``1 + weight``.

    With ``condition_dim`` (adaRMS), a condition ``[B, dim]``, or of each token ``[B, N, dim]``,
    determines scale, shift and a gate instead.
    """

    def __init__(self, dim: int, condition_dim: int | None = None) -> None:
        super().__init__()
        if condition_dim is None:
            self.weight = nn.Parameter(torch.zeros(dim))
        else:
            self.dense = nn.Linear(condition_dim, 3 * dim)
            nn.init.zeros_(self.dense.weight)
            nn.init.zeros_(self.dense.bias)
        self.adaptive = condition_dim is not None

    def forward(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the normalised ``x`` and a gate ``[B, 1 or N, dim]`` for the sublayer's output."""
        if not self.adaptive and fused.usable(x):
            return fused.rms_norm(x, self.weight, 1e-6, offset=1.0), None
        normed = x.float()
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + 1e-6)
        if not self.adaptive:
            return (normed * (1 + self.weight.float())).to(x.dtype), None
        assert condition is not None
        scale, shift, gate = self.dense(
            condition if condition.ndim == 3 else condition[:, None]
        ).chunk(3, dim=-1)
        return (normed * (1 + scale.float()) + shift.float()).to(x.dtype), gate.to(x.dtype)


class GatedMlp(nn.Module):
    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.mlp_dim, bias=False)
        self.up_proj = nn.Linear(config.width, config.mlp_dim, bias=False)
        self.down_proj = nn.Linear(config.mlp_dim, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if fused.usable(x):
            return self.down_proj(fused.gelu_times(self.gate_proj(x), self.up_proj(x)))
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Attention(nn.Module):
    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.width, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.width, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.width, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.width, bias=False)

    def forward(
        self, x: Tensor, rotation: Tensor, mask: Tensor, before: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the output and the keys and values of ``x``.

        ``before``: preceding keys and values to attend to. ``mask``: additive ``[B, 1, N, M]``.
        """
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate_both(q, k, rotation)
        if computes_on_cuda(x.device) and before is not None:
            heads = few_queries_attention(q, (before[0], k), (before[1], v), mask)
        else:
            keys, values = (
                (k, v)
                if before is None
                else (torch.cat([before[0], k], dim=2), torch.cat([before[1], v], dim=2))
            )
            heads = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask.to(q.dtype), enable_gqa=True
            )
        return self.o_proj(heads.transpose(1, 2).flatten(2)), (k, v)


class Layer(nn.Module):
    def __init__(self, config: GemmaConfig, condition_dim: int | None) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = GatedMlp(config)
        self.input_layernorm = RMSNorm(config.width, condition_dim)
        self.post_attention_layernorm = RMSNorm(config.width, condition_dim)

    def forward(
        self,
        x: Tensor,
        rotation: Tensor,
        mask: Tensor,
        before: tuple[Tensor, Tensor] | None,
        condition: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        normed, gate = self.input_layernorm(x, condition)
        attended, own = self.self_attn(normed, rotation, mask, before)
        x = x + (attended if gate is None else gate * attended)
        normed, gate = self.post_attention_layernorm(x, condition)
        changed = self.mlp(normed)
        return x + (changed if gate is None else gate * changed), own


class Gemma(nn.Module):
    """A stack of layers with a final norm."""

    def __init__(self, config: GemmaConfig, condition_dim: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, condition_dim) for _ in range(config.depth))
        self.norm = RMSNorm(config.width, condition_dim)
        self.head_dim = config.head_dim

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        visible: Tensor,
        before: KeysAndValues | None = None,
        condition: Tensor | None = None,
    ) -> tuple[Tensor, KeysAndValues]:
        """Return the normalised last states and each layer's keys and values.

        ``x``: ``[B, N, width]``; ``positions``: int64 ``[B, N]``. ``visible``: bool ``[B, N, M]``,
        the attention mask over ``M`` tokens: those of ``before``, then those of ``x``.
        """
        mask = additive_mask(visible, x.dtype)
        rotation = rotations(positions, self.head_dim)
        own: KeysAndValues = []
        for index, layer in enumerate(self.layers):
            x, pair = layer(x, rotation, mask, before[index] if before else None, condition)
            own.append(pair)
        return self.norm(x, condition)[0], own

"""Action head of GR00T N1.5 under its official state-dict names.

Sources: NVIDIA Isaac-GR00T ``action_head/flow_matching_action_head.py``, ``cross_attention_dit.py``
and ``action_encoder.py`` (as in lerobot 0.4.4), and the modules of diffusers that they build on.
Dropout is left out, because a log-probability must be found again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..flow_network import KeysAndValues

TIME_CHANNELS = 256


@dataclass(frozen=True)
class TransformerSizes:
    """Of one of the two transformers; both map ``width`` to itself."""

    layers: int
    heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class HeadConfig:
    """Sizes; dimensions of states and actions include padding."""

    dit: TransformerSizes
    cross: tuple[bool, ...]
    """Of each block of the DiT: whether it attends to images and text, else to its own tokens."""
    vl: TransformerSizes
    vlm_width: int
    hidden: int
    """Width inside the projectors, and of the DiT's output."""
    state_dim: int
    action_dim: int
    horizon: int
    positions: int
    future_tokens: int
    time_buckets: int


class CategorySpecificLinear(nn.Module):
    """A linear layer of one embodiment; files hold those of all (``checkpoint.Row``)."""

    def __init__(self, input_dim: int, output_dim: int) -> None:
        super().__init__()
        # officially 0.02, which is as much at full size, and too little at small ones
        self.W = nn.Parameter(input_dim**-0.5 * torch.randn(input_dim, output_dim))
        self.b = nn.Parameter(torch.zeros(output_dim))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.W.dtype) @ self.W + self.b


class CategorySpecificMLP(nn.Module):
    def __init__(self, input_dim: int, hidden_dim: int, output_dim: int) -> None:
        super().__init__()
        self.layer1 = CategorySpecificLinear(input_dim, hidden_dim)
        self.layer2 = CategorySpecificLinear(hidden_dim, output_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(F.relu(self.layer1(x)))


class Waves(nn.Module):
    """Sine and cosine of times at frequencies ``exp(exponents)``.

    They are computed, not loaded: they must not be on meta while the weights are. Their rounding is
    the official one, because an angle is off by up to a thousand times as much.
    """

    frequencies: Tensor

    def __init__(self, exponents: Tensor) -> None:
        super().__init__()
        self.register_buffer("frequencies", exponents.exp(), persistent=False)

    def forward(self, bucket: Tensor) -> tuple[Tensor, Tensor]:
        """``bucket``: ``[B]``; returns ``[B, len(exponents)]`` each."""
        angles = bucket.float()[:, None] * self.frequencies
        return angles.sin(), angles.cos()


class ActionEncoder(nn.Module):
    def __init__(self, action_dim: int, width: int) -> None:
        super().__init__()
        self.W1 = CategorySpecificLinear(action_dim, width)
        self.W2 = CategorySpecificLinear(2 * width, width)
        self.W3 = CategorySpecificLinear(width, width)
        with torch.device("cpu"):  # see Waves
            self.waves = Waves(
                -torch.arange(width // 2) * (torch.tensor(10000.0).log() / (width // 2))
            )

    def forward(self, x: Tensor, bucket: Tensor) -> Tensor:
        """Encode actions ``[B, H, A]`` at the times ``bucket`` ``[B]`` as ``[B, H, width]``."""
        embedded = self.W1(x)
        time = torch.cat(self.waves(bucket), dim=-1)
        mixed = torch.cat([embedded, time.to(embedded.dtype)[:, None].expand_as(embedded)], dim=-1)
        return self.W3(F.silu(self.W2(mixed)))


class TimestepEncoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers = {"linear_1": nn.Linear(TIME_CHANNELS, width), "linear_2": nn.Linear(width, width)}
        self.timestep_embedder = nn.ModuleDict(layers)
        with torch.device("cpu"):  # see Waves
            count = TIME_CHANNELS // 2
            self.waves = Waves(
                -math.log(10000.0) * torch.arange(count, dtype=torch.float32) / (count - 1)
            )

    def forward(self, bucket: Tensor) -> Tensor:
        first: Any = self.timestep_embedder["linear_1"]
        second = self.timestep_embedder["linear_2"]
        sin, cos = self.waves(bucket)
        return second(F.silu(first(torch.cat([cos, sin], dim=-1).to(first.weight.dtype))))


class AdaLayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.linear(F.silu(time)).chunk(2, dim=1)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None]


class Attention(nn.Module):
    def __init__(self, sizes: TransformerSizes, key_width: int) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.to_q = nn.Linear(sizes.width, sizes.width)
        self.to_k = nn.Linear(key_width, sizes.width)
        self.to_v = nn.Linear(key_width, sizes.width)
        self.to_out = nn.Sequential(nn.Linear(sizes.width, sizes.width))

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[B, heads, N, head_dim]`` each."""
        return self._heads(self.to_k(x)), self._heads(self.to_v(x))

    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        heads = F.scaled_dot_product_attention(self._heads(self.to_q(x)), *pair, attn_mask=mask)
        return self.to_out(heads.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class GELULinear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class Block(nn.Module):
    """Attention and a feed-forward network; with ``ada`` its first norm depends on the time."""

    def __init__(self, sizes: TransformerSizes, key_width: int, ada: bool) -> None:
        super().__init__()
        width = sizes.width
        self.norm1 = AdaLayerNorm(width) if ada else nn.LayerNorm(width)
        self.attn1 = Attention(sizes, key_width)
        self.norm3 = nn.LayerNorm(width, elementwise_affine=not ada)
        # index 1 was dropout
        self.ff = nn.ModuleDict(
            {"net": nn.Sequential(GELULinear(width), nn.Identity(), nn.Linear(4 * width, width))}
        )

    def forward(
        self,
        x: Tensor,
        time: Tensor | None = None,
        pair: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """``pair``: keys and values to attend to; None: those of ``x``."""
        normed = self.norm1(x) if time is None else self.norm1(x, time)
        x = x + self.attn1(
            normed, self.attn1.keys_and_values(normed) if pair is None else pair, mask
        )
        return x + self.ff["net"](self.norm3(x))


class SelfAttentionTransformer(nn.Module):
    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(
            Block(sizes, sizes.width, ada=False) for _ in range(sizes.layers)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.transformer_blocks:
            x = block(x, mask=mask)
        return x


class DiT(nn.Module):
    """Its blocks attend in turn to images and text, and to their own tokens."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        sizes = config.dit
        width = config.dit.width
        self.cross = config.cross
        self.timestep_encoder = TimestepEncoder(width)
        self.transformer_blocks = nn.ModuleList(
            Block(sizes, config.vlm_width if is_cross else width, ada=True)
            for is_cross in config.cross
        )
        self.norm_out = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.proj_out_1 = nn.Linear(width, 2 * width)
        self.proj_out_2 = nn.Linear(width, config.hidden)

    def keys_and_values(self, vl: Tensor) -> KeysAndValues:
        """Return those of each block that attends to images and text ``[B, P, vlm_width]``."""
        blocks: Any = zip(self.transformer_blocks, self.cross, strict=True)
        return [block.attn1.keys_and_values(vl) for block, cross in blocks if cross]

    def forward(self, x: Tensor, pairs: KeysAndValues, mask: Tensor, bucket: Tensor) -> Tensor:
        time = self.timestep_encoder(bucket)
        keys_and_values = iter(pairs)
        for block, cross in zip(self.transformer_blocks, self.cross, strict=True):
            x = block(x, time, next(keys_and_values), mask) if cross else block(x, time)
        shift, scale = self.proj_out_1(F.silu(time)).chunk(2, dim=1)
        return self.proj_out_2(self.norm_out(x) * (1 + scale[:, None]) + shift[:, None])


class ActionHead(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width = config.dit.width
        self.model = DiT(config)
        self.state_encoder = CategorySpecificMLP(config.state_dim, config.hidden, width)
        self.action_encoder = ActionEncoder(config.action_dim, width)
        self.action_decoder = CategorySpecificMLP(config.hidden, config.hidden, config.action_dim)
        self.future_tokens = nn.Embedding(config.future_tokens, width)
        self.vlln = nn.LayerNorm(config.vlm_width)
        self.vl_self_attention = SelfAttentionTransformer(config.vl)
        self.position_embedding = nn.Embedding(config.positions, width)
        for embedding in (self.future_tokens, self.position_embedding):
            nn.init.normal_(embedding.weight, std=0.02)

"""OpenVLA's two vision towers with timm's parameter names.

Published weights and LoRA adapters therefore load unchanged. Sources: timm
``vit_large_patch14_reg4_dinov2`` and ``vit_so400m_patch14_siglip_224``, as openvla uses them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ViTConfig:
    embed_dim: int
    depth: int
    num_heads: int
    patch_size: int
    img_size: int
    mlp_ratio: float = 4.0
    class_token: bool = False
    reg_tokens: int = 0
    layer_scale: bool = False
    attn_pool: bool = False


TIMM = {
    "vit_large_patch14_reg4_dinov2.lvd142m": ViTConfig(
        1024, 24, 16, 14, 224, 4.0, True, 4, layer_scale=True
    ),
    "vit_so400m_patch14_siglip_224": ViTConfig(1152, 27, 16, 14, 224, 3.7362, attn_pool=True),
}
"""Sizes of the towers that ``timm_model_ids`` of a published config.json names."""


class PatchEmbed(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(
            3, config.embed_dim, kernel_size=config.patch_size, stride=config.patch_size
        )

    def forward(self, pixels: Tensor) -> Tensor:
        return self.proj(pixels).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.embed_dim, 3 * config.embed_dim)
        self.proj = nn.Linear(config.embed_dim, config.embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        hidden = int(config.embed_dim * config.mlp_ratio)
        self.fc1 = nn.Linear(config.embed_dim, hidden)
        self.fc2 = nn.Linear(hidden, config.embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class LayerScale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        # timm calls it gamma; the published checkpoints use scale_factor
        self.scale_factor = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class Block(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.embed_dim, eps=1e-6)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.embed_dim, eps=1e-6)
        self.mlp = Mlp(config)
        self.ls1: nn.Module = LayerScale(config.embed_dim) if config.layer_scale else nn.Identity()
        self.ls2: nn.Module = LayerScale(config.embed_dim) if config.layer_scale else nn.Identity()

    def forward(self, x: Tensor, text: Tensor | None = None) -> Tensor:
        return self.second(self.first(x))

    def first(self, x: Tensor) -> Tensor:
        return x + self.ls1(self.attn(self.norm1(x)))

    def second(self, x: Tensor) -> Tensor:
        return x + self.ls2(self.mlp(self.norm2(x)))


class FiLMBlock(nn.Module):
    """Block with FiLM: the instruction scales and shifts the residual stream after attention.

    Source: openvla-oft ``prismatic/models/film_vit_wrapper.py``.
    """

    def __init__(self, block: Block, dim: int, text_dim: int) -> None:
        super().__init__()
        self.block = block
        self.scale = nn.Linear(text_dim, dim)
        self.shift = nn.Linear(text_dim, dim)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        x = self.block.first(x)
        return self.block.second(x * (1 + self.scale(text)[:, None]) + self.shift(text)[:, None])


class AttentionPool(nn.Module):
    """SigLIP's pooling head. OpenVLA does not run it, but checkpoints contain its weights."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.zeros(1, 1, config.embed_dim))
        self.q = nn.Linear(config.embed_dim, config.embed_dim)
        self.kv = nn.Linear(config.embed_dim, 2 * config.embed_dim)
        self.proj = nn.Linear(config.embed_dim, config.embed_dim)
        self.norm = nn.LayerNorm(config.embed_dim, eps=1e-6)
        self.mlp = Mlp(config)


class VisionTransformer(nn.Module):
    def __init__(self, config: ViTConfig, film_dim: int | None = None) -> None:
        """``film_dim``: size of the instruction's embedding if it modulates the blocks (FiLM)."""
        super().__init__()
        patches = (config.img_size // config.patch_size) ** 2
        if config.class_token:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, config.embed_dim))
        if config.reg_tokens:
            self.reg_token = nn.Parameter(torch.zeros(1, config.reg_tokens, config.embed_dim))
        self.prefix_tokens = int(config.class_token) + config.reg_tokens
        self.pos_embed = nn.Parameter(torch.randn(1, patches, config.embed_dim) * 0.02)
        self.patch_embed = PatchEmbed(config)
        blocks = (Block(config) for _ in range(config.depth))
        self.blocks = nn.ModuleList(
            FiLMBlock(block, config.embed_dim, film_dim) if film_dim else block for block in blocks
        )
        self.norm = nn.LayerNorm(config.embed_dim, eps=1e-6)
        if config.attn_pool:
            self.attn_pool = AttentionPool(config)

    def forward(self, pixels: Tensor, text: Tensor | None = None) -> Tensor:
        """Return patch features ``[B, patches, embed_dim]`` of the second-to-last block.

        Without the final norm, as openvla. ``text``: instruction embedding ``[B, film_dim]`` for
        FiLM.
        """
        x = self.patch_embed(pixels) + self.pos_embed
        prefix = [
            getattr(self, name).expand(len(x), -1, -1)
            for name in ("cls_token", "reg_token")
            if hasattr(self, name)
        ]
        x = torch.cat([*prefix, x], dim=1)
        for block in self.blocks[:-1]:
            x = block(x, text)
        return x[:, self.prefix_tokens :]

"""The network of π₀ and π₀.₅: PaliGemma sees images and text once, an action expert denoises beside its keys and values.

Under openpi's own state-dict names, so that its checkpoints load unchanged. Source: openpi ``models_pytorch/pi0_pytorch.py`` and
``gemma_pytorch.py``. Every layer is one attention over two streams: prefix tokens go through PaliGemma's weights, suffix tokens through the
expert's. The prefix never sees the suffix, so its keys and values serve all denoising steps, in training too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
"""openpi's variant names."""

SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
}
PALIGEMMA_VOCABULARY = 257152

KeysAndValues = list[tuple[Tensor, Tensor]]
"""Per layer, rotated keys and values ``[B, kv_heads, N, head_dim]``."""


class RMSNorm(nn.Module):
    """Gemma's: in float32, scaled by ``1 + weight``. With ``condition_dim`` a condition gives scale, shift and a gate instead (adaRMS)."""

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
        """Returns the normalised ``x`` and the gate ``[B, 1, dim]`` for what the following sublayer adds."""
        normed = x.float()
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + 1e-6)
        if not self.adaptive:
            return (normed * (1 + self.weight.float())).to(x.dtype), None
        scale, shift, gate = self.dense(condition)[:, None].chunk(3, dim=-1)
        return (normed * (1 + scale.float()) + shift.float()).to(x.dtype), gate


class GatedMlp(nn.Module):
    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.mlp_dim, bias=False)
        self.up_proj = nn.Linear(config.width, config.mlp_dim, bias=False)
        self.down_proj = nn.Linear(config.mlp_dim, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
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
        """``before``: keys and values to attend to besides those of ``x``. ``mask``: additive ``[B, 1, N, M]``. Also returns its own."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, rotation), rotate(k, rotation)
        keys, values = (k, v) if before is None else (torch.cat([before[0], k], dim=2), torch.cat([before[1], v], dim=2))
        heads = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask.to(q.dtype), enable_gqa=True)
        return self.o_proj(heads.transpose(1, 2).flatten(2)), (k, v)


class Layer(nn.Module):
    def __init__(self, config: GemmaConfig, condition_dim: int | None) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = GatedMlp(config)
        self.input_layernorm = RMSNorm(config.width, condition_dim)
        self.post_attention_layernorm = RMSNorm(config.width, condition_dim)

    def forward(
        self, x: Tensor, rotation: Tensor, mask: Tensor, before: tuple[Tensor, Tensor] | None, condition: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        normed, gate = self.input_layernorm(x, condition)
        attended, own = self.self_attn(normed, rotation, mask, before)
        x = x + (attended if gate is None else gate * attended)
        normed, gate = self.post_attention_layernorm(x, condition)
        changed = self.mlp(normed)
        return x + (changed if gate is None else gate * changed), own


class Gemma(nn.Module):
    """A stack of layers with its final norm."""

    def __init__(self, config: GemmaConfig, condition_dim: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, condition_dim) for _ in range(config.depth))
        self.norm = RMSNorm(config.width, condition_dim)
        self.head_dim = config.head_dim

    def forward(
        self, x: Tensor, positions: Tensor, visible: Tensor, before: KeysAndValues | None = None, condition: Tensor | None = None
    ) -> tuple[Tensor, KeysAndValues]:
        """``x`` ``[B, N, width]`` at ``positions`` int64 ``[B, N]``. Returns the normalised last states and each layer's keys and values.

        visible: bool ``[B, N, M]``, which of the ``M`` tokens (those of ``before``, then its own) each may attend to.
        """
        # a row that may attend to nothing (padding) attends to all, because a softmax over nothing is NaN; nobody reads it
        visible = visible | ~visible.any(-1, keepdim=True)
        mask = torch.zeros(visible.shape, dtype=x.dtype, device=x.device).masked_fill_(~visible, float("-inf"))[:, None]
        rotation = rotations(positions, self.head_dim)
        own: KeysAndValues = []
        for index, layer in enumerate(self.layers):
            x, pair = layer(x, rotation, mask, before[index] if before else None, condition)
            own.append(pair)
        return self.norm(x, condition)[0], own


def rotations(positions: Tensor, head_dim: int) -> Tensor:
    """cos and sin, float32 ``[2, B, 1, N, head_dim / 2]`` (RoPE, base 10000)."""
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions[:, None, :, None].float() * frequencies
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """``[B, heads, N, head_dim]``, halves as pairs."""
    cos, sin = rotation
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def time_embedding(time: Tensor, dim: int, min_period: float = 4e-3, max_period: float = 4.0) -> Tensor:
    """sin and cos at geometric periods, ``[B]`` to ``[B, dim]``; in float64, as openpi."""
    fraction = torch.linspace(0.0, 1.0, dim // 2, dtype=torch.float64, device=time.device)
    angles = time.double()[:, None] * (2 * math.pi / (min_period * (max_period / min_period) ** fraction))
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


@dataclass
class Prefix:
    """What the expert needs of images and text: states ``[B, P, width]``, keys and values, and which tokens count (bool ``[B, P]``)."""

    states: Tensor
    keys_and_values: KeysAndValues
    mask: Tensor

    def detach(self) -> Prefix:
        return Prefix(self.states.detach(), [(k.detach(), v.detach()) for k, v in self.keys_and_values], self.mask)


class VisionTower(nn.Module):
    """transformers' own SigLIP, one name deeper."""

    def __init__(self, config: dict[str, Any]) -> None:
        from transformers import SiglipVisionConfig, SiglipVisionModel

        super().__init__()
        sizes = {key: value for key, value in config.items() if key != "projection_dim"}
        siglip = SiglipVisionConfig(**sizes, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6, vision_use_head=False)
        siglip._attn_implementation = "sdpa"
        self.vision_model = SiglipVisionModel(siglip)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.vision_model(pixel_values=pixels).last_hidden_state


class _PaliGemmaModel(nn.Module):
    def __init__(self, config: Pi0Config) -> None:
        super().__init__()
        self.vision_tower = VisionTower(config.vision)
        self.multi_modal_projector = nn.ModuleDict({"linear": nn.Linear(config.vision["hidden_size"], config.paligemma.width)})
        self.language_model = Gemma(config.paligemma)


class _PaliGemma(nn.Module):
    def __init__(self, config: Pi0Config) -> None:
        super().__init__()
        self.model = _PaliGemmaModel(config)
        self.lm_head = nn.Linear(config.paligemma.width, config.vocab_size, bias=False)  # tied: read as the embedding of the text


class _Expert(nn.Module):
    def __init__(self, config: Pi0Config) -> None:
        super().__init__()
        self.model = Gemma(config.expert, config.expert.width if config.pi05 else None)
        self.lm_head = nn.Linear(config.expert.width, config.vocab_size, bias=False)  # never run; in every published file


class _PaliGemmaWithExpert(nn.Module):
    def __init__(self, config: Pi0Config) -> None:
        super().__init__()
        self.paligemma = _PaliGemma(config)
        self.gemma_expert = _Expert(config)


@dataclass(frozen=True)
class Pi0Config:
    """Sizes of a π₀ (or, with ``pi05``, a π₀.₅): action_dim and horizon are the network's own, padding included."""

    paligemma: GemmaConfig
    expert: GemmaConfig
    vision: dict[str, Any]
    vocab_size: int
    action_dim: int
    horizon: int
    pi05: bool


class Pi0Network(nn.Module):
    def __init__(self, config: Pi0Config) -> None:
        super().__init__()
        self.config = config
        width = config.expert.width
        self.paligemma_with_expert = _PaliGemmaWithExpert(config)
        self.action_in_proj = nn.Linear(config.action_dim, width)
        self.action_out_proj = nn.Linear(width, config.action_dim)
        if config.pi05:
            self.time_mlp_in = nn.Linear(width, width)
            self.time_mlp_out = nn.Linear(width, width)
        else:
            self.state_proj = nn.Linear(config.action_dim, width)
            self.action_time_mlp_in = nn.Linear(2 * width, width)
            self.action_time_mlp_out = nn.Linear(width, width)

    def prefix(self, images: Tensor, image_mask: Tensor, token_ids: Tensor, token_mask: Tensor) -> Prefix:
        """``images`` float ``[B, I, 3, H, W]`` in [-1, 1], ``image_mask`` bool ``[B, I]``; text int64 and bool ``[B, L]``.

        Everything in the prefix sees everything that counts. Positions skip what does not, so leaving a masked camera out changes nothing.
        """
        embeds, mask = self.embed_prefix(images, image_mask, token_ids, token_mask)
        gemma = self.paligemma_with_expert.paligemma.model.language_model
        states, pairs = gemma(embeds, mask.cumsum(1) - 1, mask[:, None, :] & mask[:, :, None])
        return Prefix(states, pairs, mask)

    def embed_prefix(self, images: Tensor, image_mask: Tensor, token_ids: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings ``[B, P, width]`` and which of them count, bool ``[B, P]``."""
        paligemma = self.paligemma_with_expert.paligemma
        patches = paligemma.model.vision_tower(images.flatten(0, 1))
        patches = paligemma.model.multi_modal_projector["linear"](patches).unflatten(0, images.shape[:2])
        text = F.embedding(token_ids, paligemma.lm_head.weight) * self.config.paligemma.width**0.5
        mask = torch.cat([image_mask.repeat_interleave(patches.shape[2], dim=1), token_mask], dim=1)
        return torch.cat([patches.flatten(1, 2), text.to(patches.dtype)], dim=1), mask

    def embed_suffix(self, state: Tensor, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor | None]:
        """Suffix tokens ``[B, N, width]`` and, for π₀.₅, the adaRMS condition ``[B, width]``."""
        dtype = self.action_in_proj.weight.dtype
        actions = self.action_in_proj(x.to(dtype))
        embedded = time_embedding(time, actions.shape[-1]).to(dtype)
        if self.config.pi05:
            return actions, F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(embedded))))
        mixed = torch.cat([actions, embedded[:, None].expand_as(actions)], dim=-1)
        mixed = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(mixed)))
        return torch.cat([self.state_proj(state.to(dtype))[:, None], mixed], dim=1), None

    def suffix_starts(self, count: int) -> Tensor:
        """bool ``[count]``: where a block of suffix tokens begins. A token sees its own block and those before it: the state no action."""
        return torch.arange(count) < (1 if self.config.pi05 else 2)

    def velocity(self, prefix: Prefix, state: Tensor, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """``E[noise - action | x]`` float32 ``[B, H, action_dim]`` at ``x`` and ``time`` ``[B]`` (1 is noise, 0 the action), and the
        expert's last states ``[B, H, width]``. ``state`` ``[B, action_dim]`` is read by π₀ only."""
        embeds, condition = self.embed_suffix(state, x, time)
        batch, count = embeds.shape[:2]
        blocks = self.suffix_starts(count).to(x.device).cumsum(0)
        own = (blocks[None, :] <= blocks[:, None]).expand(batch, -1, -1)
        visible = torch.cat([prefix.mask[:, None, :].expand(-1, count, -1), own], dim=2)
        positions = prefix.mask.sum(1, keepdim=True) + torch.arange(count, device=x.device)
        expert = self.paligemma_with_expert.gemma_expert.model
        states, _ = expert(embeds, positions, visible, prefix.keys_and_values, condition)
        states = states[:, -self.config.horizon :]
        return self.action_out_proj(states.to(self.action_out_proj.weight.dtype)).float(), states

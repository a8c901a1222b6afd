"""Network of SmolVLA under lerobot's state-dict names.

Source: lerobot 0.3.3 ``policies/smolvla/modeling_smolvla.py`` and ``smolvlm_with_expert.py``.
SmolVLM2's first layers encode images, text and the state, which they see last. Layers of the action
expert attend, in turn, to the keys and values of the same layer together with their own (self
attention), or to projections of them alone (cross attention). Images and text do not attend to the
state, nor any of these to the actions, so their keys and values serve all denoising steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..flow_network import KeysAndValues, Prefix, additive_mask, rotations, with_time
from ..rotation import rotate


@dataclass(frozen=True)
class SmolVLAConfig:
    """Sizes; dimensions of states and actions, and the horizon, include padding."""

    text: dict[str, Any]
    """``text_config`` of SmolVLM's config.json; only the first layers are built."""
    vision: dict[str, Any]
    scale_factor: int
    """Patches per side that become one token."""
    cross: tuple[bool, ...]
    """Of each layer of the expert, and of the language model: whether it is cross attention."""
    expert_width: int
    state_dim: int
    action_dim: int
    horizon: int
    min_period: float
    max_period: float

    @property
    def expert_mlp_dim(self) -> int:
        """8/3 of the width, rounded up to a multiple of 256: ``get_intermediate_size``."""
        return -(-(4 * int(2 * self.expert_width / 3)) // 256) * 256


class Attention(nn.Module):
    def __init__(self, text: Any, width: int, cross: bool) -> None:
        super().__init__()
        self.head_dim = text.head_dim
        self.cross = cross
        own = text.num_attention_heads * self.head_dim
        keys = text.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, own, bias=False)
        self.k_proj = nn.Linear(keys if cross else width, keys, bias=False)
        self.v_proj = nn.Linear(keys if cross else width, keys, bias=False)
        self.o_proj = nn.Linear(own, width, bias=False)

    def forward(
        self, x: Tensor, rotation: Tensor, mask: Tensor, before: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the output and the keys and values of ``x``, or those that cross attention reads.

        ``before``: keys and values of preceding tokens. ``mask``: additive ``[B, 1, N, M]``.
        """
        if self.cross:
            assert before is not None
            k, v = (
                self._heads(proj(tensor.transpose(1, 2).flatten(2)))
                for proj, tensor in zip((self.k_proj, self.v_proj), before, strict=True)
            )
            keys, values = k, v
        else:
            k = rotate(self._heads(self.k_proj(x)), *rotation)
            v = self._heads(self.v_proj(x))
            keys, values = (
                (k, v)
                if before is None
                else (torch.cat([before[0], k], dim=2), torch.cat([before[1], v], dim=2))
            )
        q = rotate(self._heads(self.q_proj(x)), *rotation)
        heads = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask.to(q.dtype), enable_gqa=True
        )
        return self.o_proj(heads.transpose(1, 2).flatten(2)), (k, v)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, text: Any, width: int, cross: bool) -> None:
        from ..fused_llama import MLP, RMSNorm

        super().__init__()
        self.self_attn = Attention(text, width, cross)
        self.mlp = MLP(text)
        self.input_layernorm = RMSNorm(width, text.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(width, text.rms_norm_eps)

    def forward(
        self, x: Tensor, rotation: Tensor, mask: Tensor, before: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        attended, own = self.self_attn(self.input_layernorm(x), rotation, mask, before)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), own


class Stream(nn.Module):
    """Llama layers through which one kind of tokens passes, with a final norm."""

    def __init__(
        self,
        sizes: dict[str, Any],
        width: int,
        mlp_dim: int,
        cross: tuple[bool, ...],
        embedding: bool,
    ) -> None:
        from transformers import LlamaConfig

        from ..fused_llama import RMSNorm

        super().__init__()
        text = LlamaConfig(**sizes | {"hidden_size": width, "intermediate_size": mlp_dim})
        if embedding:
            self.embed_tokens = nn.Embedding(text.vocab_size, width)
            nn.init.normal_(self.embed_tokens.weight, std=width**-0.5)
        self.layers = nn.ModuleList(Layer(text, width, is_cross) for is_cross in cross)
        self.norm = RMSNorm(width, text.rms_norm_eps)
        self.head_dim: int = sizes["head_dim"]
        self.cross = cross

    def forward(
        self, x: Tensor, own: Tensor, positions: Tensor, before: Prefix | None = None
    ) -> tuple[Tensor, KeysAndValues]:
        """Return the normalised last states and each layer's keys and values.

        ``x``: ``[B, N, width]``; ``own``: bool ``[B, N, N]``, the attention mask over ``x``;
        ``positions``: int64 ``[B, N]``. ``before``: tokens that all of ``x`` attend to.
        """
        visible = (
            own
            if before is None
            else torch.cat([before.mask[:, None].expand(-1, x.shape[1], -1), own], dim=2)
        )
        mask = additive_mask(visible, x.dtype)
        rotation = rotations(positions, self.head_dim)
        from_zero = rotations(positions - positions[:, :1], self.head_dim)
        pairs: KeysAndValues = []
        for index, (layer, cross) in enumerate(zip(self.layers, self.cross, strict=True)):
            count = visible.shape[2] - x.shape[1] if cross else visible.shape[2]
            prefix_pair = None if before is None else before.keys_and_values[index]
            x, pair = layer(x, from_zero if cross else rotation, mask[..., :count], prefix_pair)
            pairs.append(pair)
        return self.norm(x), pairs


def vlm_with_expert(config: SmolVLAConfig) -> nn.ModuleDict:
    """Both streams, nested and named as in lerobot."""
    from transformers import SmolVLMConfig, SmolVLMVisionConfig
    from transformers.models.smolvlm.modeling_smolvlm import (
        SmolVLMConnector,
        SmolVLMVisionTransformer,
    )

    vision = SmolVLMVisionConfig(**config.vision)
    vision._attn_implementation = "sdpa"
    width = config.text["hidden_size"]
    joined = SmolVLMConfig(
        text_config=config.text, vision_config=config.vision, scale_factor=config.scale_factor
    )
    vlm = {
        "vision_model": SmolVLMVisionTransformer(vision),
        "connector": SmolVLMConnector(joined),
        "text_model": Stream(
            config.text,
            width,
            config.text["intermediate_size"],
            (False,) * len(config.cross),
            embedding=True,
        ),
    }
    unused = nn.Linear(width, config.text["vocab_size"], bias=False).requires_grad_(
        False
    )  # but in every published file
    expert = Stream(
        config.text, config.expert_width, config.expert_mlp_dim, config.cross, embedding=False
    )
    return nn.ModuleDict(
        {
            "vlm": nn.ModuleDict({"model": nn.ModuleDict(vlm), "lm_head": unused}),
            "lm_expert": expert,
        }
    )


class SmolVLANetwork(nn.Module):
    """SmolVLA under lerobot's names, without their first part ``model``."""

    def __init__(self, config: SmolVLAConfig) -> None:
        super().__init__()
        self.config = config
        width = config.expert_width
        self.vlm_with_expert: Any = vlm_with_expert(config)
        self.state_proj = nn.Linear(config.state_dim, config.text["hidden_size"])
        self.action_in_proj = nn.Linear(config.action_dim, width)
        self.action_out_proj = nn.Linear(width, config.action_dim)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)

    def prefix(self, images: Tensor, token_ids: Tensor, token_mask: Tensor) -> Prefix:
        """Encode images and text, which attend to each other.

        ``images``: float ``[B, I, 3, H, W]`` in [-1, 1]; text: int64 and bool ``[B, L]``.
        """
        embeds, mask = self.embed_prefix(images, token_ids, token_mask)
        positions = mask.cumsum(1) - 1
        states, pairs = self.vlm_with_expert.vlm.model.text_model(
            embeds, mask[:, None, :] & mask[:, :, None], positions
        )
        return Prefix(states, pairs, mask)

    def embed_prefix(
        self, images: Tensor, token_ids: Tensor, token_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return embeddings ``[B, P, width]`` of images and text, and their mask ``[B, P]``."""
        vlm = self.vlm_with_expert.vlm.model
        patches = (
            vlm.connector(self._patches(images.flatten(0, 1)))
            .unflatten(0, images.shape[:2])
            .flatten(1, 2)
        )
        text = F.embedding(token_ids, vlm.text_model.embed_tokens.weight)
        seen = token_mask.new_ones(patches.shape[:2])
        return torch.cat([patches, text.to(patches.dtype)], dim=1) * patches.shape[
            -1
        ] ** 0.5, torch.cat([seen, token_mask], dim=1)

    def _patches(self, pixels: Tensor) -> Tensor:
        """Encode whole images of the model's size, whose patches are numbered row by row."""
        vision = self.vlm_with_expert.vlm.model.vision_model
        embeddings = vision.embeddings
        patches = (
            embeddings.patch_embedding(pixels.to(embeddings.patch_embedding.weight.dtype))
            .flatten(2)
            .transpose(1, 2)
        )
        embedded = patches + embeddings.position_embedding.weight
        return vision.post_layernorm(vision.encoder(inputs_embeds=embedded).last_hidden_state)

    def with_state(self, prefix: Prefix, state: Tensor) -> Prefix:
        """Append the token of the state ``[B, state_dim]``, which attends to images and text."""
        token = self.state_proj(state.to(self.state_proj.weight.dtype))[:, None].to(
            prefix.states.dtype
        )
        alone = prefix.mask.new_ones(len(state), 1, 1)
        states, pairs = self.vlm_with_expert.vlm.model.text_model(
            token, alone, prefix.mask.sum(1, keepdim=True), prefix
        )
        joined = [
            (torch.cat([k, own_k], dim=2), torch.cat([v, own_v], dim=2))
            for (k, v), (own_k, own_v) in zip(prefix.keys_and_values, pairs, strict=True)
        ]
        states = states[..., : prefix.states.shape[2]]  # none if they were not packed
        return Prefix(
            torch.cat([prefix.states, states], dim=1),
            joined,
            torch.cat([prefix.mask, alone[:, 0]], dim=1),
        )

    def embed_suffix(self, x: Tensor, time: Tensor) -> Tensor:
        """Return suffix tokens ``[B, H, width]``."""
        actions = self.action_in_proj(x.to(self.action_in_proj.weight.dtype))
        mixed = with_time(actions, time, self.config.min_period, self.config.max_period)
        return self.action_time_mlp_out(F.silu(self.action_time_mlp_in(mixed)))

    def velocity(
        self, prefix: Prefix, state: Tensor, x: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the velocity and the expert's last states ``[B, H, width]``.

        The velocity ``E[noise - action | x]`` is float32 ``[B, H, action_dim]``. ``time``: ``[B]``,
        or of each action ``[B, H]``, from 1 (noise) to 0 (action). ``prefix`` contains the state.
        An action attends to itself and earlier ones.
        """
        embeds = self.embed_suffix(x, time).to(prefix.keys_and_values[0][0].dtype)
        count = embeds.shape[1]
        own = (
            torch.ones(count, count, dtype=torch.bool, device=x.device)
            .tril()
            .expand(len(x), -1, -1)
        )
        positions = prefix.mask.sum(1, keepdim=True) + torch.arange(count, device=x.device)
        states, _ = self.vlm_with_expert.lm_expert(embeds, own, positions, prefix)
        return self.action_out_proj(states.to(self.action_out_proj.weight.dtype)).float(), states

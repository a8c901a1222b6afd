"""OpenVLA's network: two vision towers, a projector and a Llama, with official state-dict names.

Source: openvla ``prismatic/extern/hf/modeling_prismatic.py``. The language model is transformers'
``LlamaForCausalLM``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .vit import TIMM, VisionTransformer, ViTConfig

if TYPE_CHECKING:
    from .cache import StaticCache


class VisionBackbone(nn.Module):
    def __init__(
        self, featurizer: ViTConfig, fused_featurizer: ViTConfig, film_dim: int | None = None
    ) -> None:
        super().__init__()
        self.featurizer = VisionTransformer(featurizer, film_dim)
        self.fused_featurizer = VisionTransformer(fused_featurizer, film_dim)

    def forward(self, pixels: Tensor, text: Tensor | None = None) -> Tensor:
        """Return patch features ``[B, I * patches, d_dino + d_siglip]``.

        ``pixels``: float ``[B, 6 I, H, W]``; per image, RGB normalised for DINO, then for SigLIP.
        """
        images = pixels.unflatten(1, (-1, 6))
        count = images.shape[1]
        dino, siglip = images.flatten(0, 1).split(3, dim=1)
        text = text.repeat_interleave(count, dim=0) if text is not None else None
        patches = torch.cat(
            [self.featurizer(dino, text), self.fused_featurizer(siglip, text)], dim=2
        )
        return patches.unflatten(0, (-1, count)).flatten(1, 2)


class Projector(nn.Module):
    def __init__(self, vision_dim: int, llm_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_dim, 4 * vision_dim)
        self.fc2 = nn.Linear(4 * vision_dim, llm_dim)
        self.fc3 = nn.Linear(llm_dim, llm_dim)

    def forward(self, patches: Tensor) -> Tensor:
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(patches)))))


class ProprioProjector(nn.Module):
    """OpenVLA-OFT's embedding of proprioception as one token after the patches."""

    def __init__(self, proprio_dim: int, llm_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(proprio_dim, llm_dim)
        self.fc2 = nn.Linear(llm_dim, llm_dim)

    def forward(self, proprio: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(proprio)))[:, None]


class PrismaticVLA(nn.Module):
    """OpenVLA's vision backbone, projector and language model, with OpenVLA-OFT's options."""

    def __init__(
        self,
        config: dict[str, Any],
        *,
        proprio_dim: int = 0,
        num_images: int = 1,
        film: bool = False,
        bidirectional: bool = False,
    ) -> None:
        """``config``: an official config.json, or a tiny one with tower sizes in ``vision_config``.

        film: the instruction modulates the vision towers. bidirectional: attention is not causal.
        """
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import (
            LlamaRotaryEmbedding,
        )  # here, because importing a plug-in must not take seconds

        from ..fused_llama import fuse
        from .last_layer import end_with_last_layer

        super().__init__()
        if "vision_config" in config:
            towers = [
                ViTConfig(**config["vision_config"][name])
                for name in ("featurizer", "fused_featurizer")
            ]
        else:
            towers = [TIMM[name] for name in config["timm_model_ids"]]
        text = {
            key: value
            for key, value in config["text_config"].items()
            if key not in ("torch_dtype", "dtype", "model_type")
        }
        llama = LlamaConfig(**(text | {"attn_implementation": "sdpa"}))
        backbone = VisionBackbone(towers[0], towers[1], llama.hidden_size if film else None)
        # openvla-oft stores a FiLM backbone under this name once more
        self.vision_backbone: Any = (
            nn.ModuleDict({"vision_backbone": backbone}) if film else backbone
        )
        self.projector = Projector(sum(tower.embed_dim for tower in towers), llama.hidden_size)
        self.language_model = LlamaForCausalLM(llama)
        fuse(self.language_model)
        end_with_last_layer(self.language_model.model)
        with torch.device("cpu"):  # computed, not loaded: must not be on meta while the weights are
            self.language_model.model.rotary_emb = LlamaRotaryEmbedding(llama)
        if "embedding_std" in config:  # for random weights; see tools/tiny_checkpoints.py
            nn.init.normal_(
                self.language_model.model.embed_tokens.weight, std=config["embedding_std"]
            )
        if proprio_dim:
            self.proprio_projector = ProprioProjector(proprio_dim, llama.hidden_size)
        self.film = film
        self.bidirectional = bidirectional
        self.prefix_length = num_images * (towers[0].img_size // towers[0].patch_size) ** 2 + bool(
            proprio_dim
        )
        self.hidden_size = llama.hidden_size

    def encode_images(
        self, pixels: Tensor, token_ids: Tensor, token_mask: Tensor, stop_id: int | None = None
    ) -> Tensor:
        """Return the towers' patch features ``[B, I * patches, d_dino + d_siglip]``.

        ``pixels``: float ``[B, 6 I, H, W]``. The others are read with FiLM only, whose mean of the
        instruction includes ``stop_id``, the token that ends the sequence.
        """
        dtype = self.language_model.model.embed_tokens.weight.dtype
        if not self.film:
            return self.vision_backbone(pixels.to(dtype))
        return self.vision_backbone.vision_backbone(
            pixels.to(dtype), self._mean_embedding(token_ids, token_mask, stop_id)
        )

    def embed_prompt(
        self, patches: Tensor, token_ids: Tensor, token_mask: Tensor, proprio: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return embeddings of ``[BOS, patches, (proprioception), prompt]`` and their bool mask.

        They are ``[B, prefix_length + L, d]``. ``patches``: of ``encode_images``; ``token_ids``:
        int64 and ``token_mask``: bool ``[B, L]`` with BOS in column 0; ``proprio``: ``[B,
        proprio_dim]`` in [-1, 1].
        """
        text = self.embed_tokens(token_ids)
        prefix = [self.projector(patches)]
        if proprio is not None:
            prefix.append(self.proprio_projector(proprio.to(text.dtype)))
        counts = token_mask.new_ones(len(text), self.prefix_length)
        return torch.cat([text[:, :1], *prefix, text[:, 1:]], dim=1), torch.cat(
            [token_mask[:, :1], counts, token_mask[:, 1:]], dim=1
        )

    def _mean_embedding(self, token_ids: Tensor, mask: Tensor, stop_id: int | None) -> Tensor:
        text = self.embed_tokens(token_ids)
        total = (text * mask[..., None]).sum(1)
        count = mask.sum(1, keepdim=True)
        if stop_id is not None:
            total = total + self.language_model.model.embed_tokens.weight[stop_id]
            count = count + 1
        return total / count

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        return self.language_model.model.embed_tokens(token_ids)

    def hidden_states(
        self,
        embeds: Tensor,
        mask: Tensor,
        cache: StaticCache | None = None,
        rows: int | None = None,
    ) -> Tensor:
        """Return last-layer states ``[B, N, d]``, undefined where ``mask`` ``[B, N]`` is false.

        A token's position is the number of unmasked tokens before it, so padding anywhere has no
        effect. ``cache`` stores keys and values. ``rows``: return only those of the last tokens.
        """
        order = torch.arange(embeds.shape[1], device=mask.device)
        visible = (
            mask[:, None, :] if self.bidirectional else mask[:, None, :] & (order <= order[:, None])
        )
        # a padding row attends to itself only, because a softmax over an empty set is NaN
        visible = visible | (order == order[:, None])
        bias = additive(visible, embeds.dtype)[:, None]
        rotations = self.rotations(embeds, mask.cumsum(dim=1) - 1)
        return self.run_layers(embeds, bias, rotations, cache, rows)

    def rotations(self, embeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotary cos and sin ``[B, N, head_dim]`` at ``positions``, in the dtype of embeds.

        Negative positions, of padding before the first token, count as 0.
        """
        return self.language_model.model.rotary_emb(embeds, position_ids=positions.clamp(min=0))

    def run_layers(
        self,
        x: Tensor,
        bias: Tensor,
        rotations: tuple[Tensor, Tensor],
        cache: StaticCache | None,
        rows: int | None = None,
    ) -> Tensor:
        """Run ``x`` ``[B, N, d]`` through the language model; attention bias ``[B, 1, N, M]``."""
        *layers, last = self.language_model.model.layers
        for layer in layers:
            x = layer(x, attention_mask=bias, position_embeddings=rotations, past_key_values=cache)
        x = last(
            x, attention_mask=bias, position_embeddings=rotations, past_key_values=cache, rows=rows
        )
        return self.language_model.model.norm(x)

    def logits_of(self, hidden: Tensor, first: int, count: int) -> Tensor:
        """Return logits ``[..., count]`` from ``first`` on; ``lm_head`` may hold no other rows."""
        layer = self.language_model.lm_head
        if not isinstance(layer, nn.Linear):  # a layer with adapters computes all rows
            return layer(hidden)[..., first : first + count]
        return F.linear(
            hidden,
            layer.weight if len(layer.weight) == count else layer.weight[first : first + count],
        )


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask to an additive attention bias: 0 where visible, else minus infinity."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, float("-inf")
    )

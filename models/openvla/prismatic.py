"""The network of OpenVLA: two vision towers, a projector and a Llama, under the official state-dict names.

Source: openvla ``prismatic/extern/hf/modeling_prismatic.py``. The language model is transformers' own ``LlamaForCausalLM``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .vit import TIMM, VisionTransformer, ViTConfig

if TYPE_CHECKING:
    from transformers import DynamicCache


class VisionBackbone(nn.Module):
    def __init__(self, featurizer: ViTConfig, fused_featurizer: ViTConfig) -> None:
        super().__init__()
        self.featurizer = VisionTransformer(featurizer)
        self.fused_featurizer = VisionTransformer(fused_featurizer)

    def forward(self, pixels: Tensor) -> Tensor:
        """``pixels`` float ``[B, 6, H, W]``: RGB normalised for DINO, then for SigLIP. Returns ``[B, patches, d_dino + d_siglip]``."""
        dino, siglip = pixels.split(3, dim=1)
        return torch.cat([self.featurizer(dino), self.fused_featurizer(siglip)], dim=2)


class Projector(nn.Module):
    def __init__(self, vision_dim: int, llm_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_dim, 4 * vision_dim)
        self.fc2 = nn.Linear(4 * vision_dim, llm_dim)
        self.fc3 = nn.Linear(llm_dim, llm_dim)

    def forward(self, patches: Tensor) -> Tensor:
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(patches)))))


class ProprioProjector(nn.Module):
    """OpenVLA-OFT's: one more token after the patches."""

    def __init__(self, proprio_dim: int, llm_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(proprio_dim, llm_dim)
        self.fc2 = nn.Linear(llm_dim, llm_dim)

    def forward(self, proprio: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(proprio)))[:, None]


class PrismaticVLA(nn.Module):
    """``vision_backbone``, ``projector`` and ``language_model`` of an OpenVLA checkpoint."""

    def __init__(self, config: dict[str, Any]) -> None:
        """``config``: an official config.json; tower sizes from ``vision_config`` (tiny models) or else ``timm_model_ids``."""
        from transformers import LlamaConfig, LlamaForCausalLM  # here, because importing a plug-in must not take seconds

        super().__init__()
        if "vision_config" in config:
            towers = [ViTConfig(**config["vision_config"][name]) for name in ("featurizer", "fused_featurizer")]
        else:
            towers = [TIMM[name] for name in config["timm_model_ids"]]
        text = {key: value for key, value in config["text_config"].items() if key not in ("torch_dtype", "dtype", "model_type")}
        llama = LlamaConfig(**(text | {"attn_implementation": "sdpa"}))
        self.vision_backbone = VisionBackbone(*towers)
        self.projector = Projector(sum(tower.embed_dim for tower in towers), llama.hidden_size)
        self.language_model = LlamaForCausalLM(llama)
        self.proprio_dim = config.get("proprio_dim", 0)
        if self.proprio_dim:
            self.proprio_projector = ProprioProjector(self.proprio_dim, llama.hidden_size)
        self.prefix_length = (towers[0].img_size // towers[0].patch_size) ** 2 + bool(self.proprio_dim)
        self.hidden_size = llama.hidden_size

    def embed_prompt(self, pixels: Tensor, token_ids: Tensor, proprio: Tensor | None = None) -> Tensor:
        """``[BOS, patches, (proprioception), prompt]`` embeddings ``[B, prefix_length + L, d]``.

        ``pixels`` float ``[B, 6, H, W]``; ``token_ids`` int64 ``[B, L]`` with BOS in column 0; ``proprio`` ``[B, proprio_dim]`` in [-1, 1].
        """
        text = self.embed_tokens(token_ids)
        prefix = [self.projector(self.vision_backbone(pixels))]
        if proprio is not None:
            prefix.append(self.proprio_projector(proprio))
        return torch.cat([text[:, :1], *prefix, text[:, 1:]], dim=1)

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        return self.language_model.model.embed_tokens(token_ids)

    def hidden_states(self, embeds: Tensor, mask: Tensor, cache: DynamicCache | None = None) -> Tensor:
        """Last-layer states ``[B, N, d]`` of the ``N`` newest tokens.

        ``mask``: bool ``[B, M]``, true where a token counts, over cached and new tokens (``M >= N``). A token's position is the number of
        real tokens before it, so padding anywhere changes nothing (transformers wants an additive float mask for that).
        """
        new, total = embeds.shape[1], mask.shape[1]
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        order = torch.arange(total, device=mask.device)
        visible = mask[:, None, :] & (order <= order[-new:, None])
        # a padding row attends to itself only, because a softmax over nothing is NaN
        visible = visible | (order == order[-new:, None])
        bias = torch.zeros(visible.shape, dtype=embeds.dtype, device=embeds.device).masked_fill_(~visible, float("-inf"))
        output = self.language_model.model(
            inputs_embeds=embeds,
            attention_mask=bias[:, None],
            position_ids=positions[:, -new:],
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return output.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        return self.language_model.lm_head(hidden)

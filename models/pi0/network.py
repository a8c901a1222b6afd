"""Network of π₀ and π₀.₅: PaliGemma encodes images and text once, an action expert denoises.

It has openpi's state-dict names, so that its checkpoints load unchanged. Source: openpi
``models_pytorch/pi0_pytorch.py`` and ``gemma_pytorch.py``. Each layer is one attention over two
streams: prefix tokens pass through PaliGemma's weights, suffix tokens through the expert's. The
prefix does not attend to the suffix, so its keys and values serve all denoising steps, also in
training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..flow_network import Prefix, time_embedding, with_time
from ..siglip import VisionTower
from .gemma import Gemma, GemmaConfig

SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
}
PALIGEMMA_VOCABULARY = 257152


@dataclass(frozen=True)
class Pi0Config:
    """Sizes of π₀ (or, with ``pi05``, π₀.₅); action_dim and horizon include padding."""

    paligemma: GemmaConfig
    expert: GemmaConfig
    vision: dict[str, Any]
    vocab_size: int
    action_dim: int
    horizon: int
    pi05: bool
    min_period: float = 4e-3
    max_period: float = 4.0
    """Of the embedding of time."""


def paligemma_with_expert(config: Pi0Config) -> nn.ModuleDict:
    """Both streams, nested and named as in openpi."""
    paligemma = {
        "vision_tower": VisionTower(config.vision),
        "multi_modal_projector": nn.ModuleDict(
            {"linear": nn.Linear(config.vision["hidden_size"], config.paligemma.width)}
        ),
        "language_model": Gemma(config.paligemma),
    }
    tied = nn.Linear(
        config.paligemma.width, config.vocab_size, bias=False
    )  # used as the text embedding
    expert = Gemma(config.expert, config.expert.width if config.pi05 else None)
    unused = nn.Linear(config.expert.width, config.vocab_size, bias=False).requires_grad_(
        False
    )  # but in every published file
    return nn.ModuleDict(
        {
            "paligemma": nn.ModuleDict({"model": nn.ModuleDict(paligemma), "lm_head": tied}),
            "gemma_expert": nn.ModuleDict({"model": expert, "lm_head": unused}),
        }
    )


class Pi0Network(nn.Module):
    """π₀ or π₀.₅ under openpi's state-dict names."""

    def __init__(self, config: Pi0Config) -> None:
        super().__init__()
        self.config = config
        width = config.expert.width
        self.paligemma_with_expert: Any = paligemma_with_expert(config)
        self.action_in_proj = nn.Linear(config.action_dim, width)
        self.action_out_proj = nn.Linear(width, config.action_dim)
        if config.pi05:
            self.time_mlp_in = nn.Linear(width, width)
            self.time_mlp_out = nn.Linear(width, width)
        else:
            self.state_proj = nn.Linear(config.action_dim, width)
            self.action_time_mlp_in = nn.Linear(2 * width, width)
            self.action_time_mlp_out = nn.Linear(width, width)

    def prefix(
        self, images: Tensor, image_mask: Tensor, token_ids: Tensor, token_mask: Tensor
    ) -> Prefix:
        """Encode images and text; attention is bidirectional over the unmasked tokens.

        ``images``: float ``[B, I, 3, H, W]`` in [-1, 1]; ``image_mask``: bool ``[B, I]``; text:
        int64 and bool ``[B, L]``. Positions skip masked tokens, so a masked camera can be left out.
        """
        embeds, mask = self.embed_prefix(images, image_mask, token_ids, token_mask)
        gemma = self.paligemma_with_expert.paligemma.model.language_model
        states, pairs = gemma(embeds, mask.cumsum(1) - 1, mask[:, None, :] & mask[:, :, None])
        return Prefix(states, pairs, mask)

    def embed_prefix(
        self, images: Tensor, image_mask: Tensor, token_ids: Tensor, token_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return embeddings ``[B, P, width]`` and their mask, bool ``[B, P]``."""
        paligemma = self.paligemma_with_expert.paligemma
        patches = paligemma.model.vision_tower(images.flatten(0, 1))
        patches = paligemma.model.multi_modal_projector["linear"](patches).unflatten(
            0, images.shape[:2]
        )
        text = F.embedding(token_ids, paligemma.lm_head.weight) * self.config.paligemma.width**0.5
        mask = torch.cat([image_mask.repeat_interleave(patches.shape[2], dim=1), token_mask], dim=1)
        return torch.cat([patches.flatten(1, 2), text.to(patches.dtype)], dim=1), mask

    def embed_suffix(self, state: Tensor, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return suffix tokens ``[B, N, width]`` and, for π₀.₅, the condition of adaRMS, which has
        the shape of ``time`` (``[B]`` or ``[B, N]``) and then ``width``."""
        dtype = self.action_in_proj.weight.dtype
        actions = self.action_in_proj(x.to(dtype))
        periods = self.config.min_period, self.config.max_period
        if self.config.pi05:
            embedded = time_embedding(time, actions.shape[-1], *periods).to(dtype)
            return actions, F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(embedded))))
        mixed = self.action_time_mlp_out(
            F.silu(self.action_time_mlp_in(with_time(actions, time, *periods)))
        )
        return torch.cat([self.state_proj(state.to(dtype))[:, None], mixed], dim=1), None

    def suffix_starts(self, count: int, device: torch.device | None = None) -> Tensor:
        """Return bool ``[count]``, true where a block of suffix tokens starts.

        A token attends to its block and earlier ones; the state does not attend to actions.
        """
        return torch.arange(count, device=device) < (1 if self.config.pi05 else 2)

    def velocity(
        self, prefix: Prefix, state: Tensor, x: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the velocity and the expert's last states ``[B, H, width]``.

        The velocity ``E[noise - action | x]`` is float32 ``[B, H, action_dim]``. ``time``: ``[B]``,
        or of each action ``[B, H]``, from 1 (noise) to 0 (action). ``state``: ``[B, action_dim]``,
        used by π₀ only.
        """
        embeds, condition = self.embed_suffix(state, x, time)
        embeds = embeds.to(prefix.states.dtype)
        batch, count = embeds.shape[:2]
        blocks = self.suffix_starts(count, x.device).cumsum(0)
        own = (blocks[None, :] <= blocks[:, None]).expand(batch, -1, -1)
        visible = torch.cat([prefix.mask[:, None, :].expand(-1, count, -1), own], dim=2)
        positions = prefix.mask.sum(1, keepdim=True) + torch.arange(count, device=x.device)
        expert = self.paligemma_with_expert.gemma_expert.model
        states, _ = expert(embeds, positions, visible, prefix.keys_and_values, condition)
        states = states[:, -self.config.horizon :]
        return self.action_out_proj(states.to(self.action_out_proj.weight.dtype)).float(), states

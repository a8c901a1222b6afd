"""Autoregressive decoding with a preallocated key-value cache; no shape depends on data."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import fused
from .actions import ActionTokenizer
from .cache import StaticCache, without_cudnn_attention
from .prismatic import PrismaticVLA, additive


class Decoder:
    """Continues a prompt whose keys and values are in ``cache``, with precomputed masks."""

    def __init__(self, network: PrismaticVLA, cache: StaticCache, mask: Tensor) -> None:
        """``mask``: bool ``[B, P]``, false for padding of the prompt."""
        self.network = network
        self.cache = cache
        self.prompt = mask.shape[1]
        follow = cache.capacity - self.prompt
        whole = F.pad(mask, (0, follow), value=True)
        weight = network.language_model.model.embed_tokens.weight
        self.bias = additive(whole, weight.dtype)[:, None, None]
        self.cos, self.sin = network.rotations(weight, (whole.cumsum(dim=1) - 1)[:, self.prompt :])

    def step(self, index: int, token_ids: Tensor) -> Tensor:
        """Feed token ``index`` after the prompt, ids ``[B]``; return its last state ``[B, d]``."""
        self.cache.filled = self.prompt + index
        rotations = self.cos[:, index, None], self.sin[:, index, None]
        embeds = self.network.embed_tokens(token_ids[:, None])
        with without_cudnn_attention():
            return self.network.run_layers(
                embeds, self.bias[..., : self.cache.filled + 1], rotations, self.cache
            )[:, 0]


def generate_reference_tokens(
    network: PrismaticVLA, embeds: Tensor, mask: Tensor, tokens: ActionTokenizer, count: int
) -> Tensor:
    """Return greedy action tokens ``[B, count]`` after a prompt ``[B, P, d]``, mask ``[B, P]``.

    By transformers' ``generate``: the baseline of ``rlinf-vla bench policy``.
    """

    def only_actions(_ids: Tensor, scores: Tensor) -> Tensor:
        allowed = slice(tokens.first_id, tokens.first_id + tokens.n_bins)
        limited = torch.full_like(scores, float("-inf"))
        limited[:, allowed] = scores[:, allowed]
        return limited

    language_model: Any = network.language_model  # transformers' annotations reject its own models
    with fused.unused():
        generated = language_model.generate(
            inputs_embeds=embeds,
            attention_mask=mask.long(),
            max_new_tokens=count,
            do_sample=False,
            logits_processor=[only_actions],
        )
    assert isinstance(generated, Tensor)
    return generated

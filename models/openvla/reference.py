"""Decode OpenVLA with transformers' ``generate``, the baseline of ``rlinf-vla bench policy``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .actions import ActionTokenizer
from .prismatic import PrismaticVLA


def generate_reference_tokens(network: PrismaticVLA, embeds: Tensor, mask: Tensor, tokens: ActionTokenizer, count: int) -> Tensor:
    """Return greedy action tokens ``[B, count]`` after a prompt ``[B, P, d]``, mask ``[B, P]``."""

    def only_actions(_ids: Tensor, scores: Tensor) -> Tensor:
        allowed = slice(tokens.first_id, tokens.first_id + tokens.n_bins)
        limited = torch.full_like(scores, float("-inf"))
        limited[:, allowed] = scores[:, allowed]
        return limited

    language_model: Any = network.language_model  # transformers' annotations reject its own models
    generated = language_model.generate(
        inputs_embeds=embeds,
        attention_mask=mask.long(),
        max_new_tokens=count,
        do_sample=False,
        logits_processor=[only_actions],
    )
    assert isinstance(generated, Tensor)
    return generated

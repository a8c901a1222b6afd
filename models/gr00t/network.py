"""Network of GR00T N1.5 under its official state-dict names.

Eagle encodes images and text once. The action head refines these features by self attention, and
denoises actions that attend to them. Source: NVIDIA Isaac-GR00T ``model/gr00t_n1.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..flow_network import Prefix, additive_mask
from .dit import ActionHead, HeadConfig
from .eagle import Eagle, EagleConfig


class GR00TNetwork(nn.Module):
    def __init__(self, eagle: EagleConfig, head: HeadConfig) -> None:
        super().__init__()
        self.config = head
        linear = (
            nn.Identity()
            if eagle.project_to is None
            else nn.Linear(eagle.text["hidden_size"], eagle.project_to)
        )
        self.backbone: Any = nn.ModuleDict({"eagle_model": Eagle(eagle), "eagle_linear": linear})
        self.action_head = ActionHead(head)

    def prefix(self, pixels: Tensor, token_ids: Tensor, places: Tensor, mask: Tensor) -> Prefix:
        """Encode images and text (see ``Eagle``); ``mask``: bool ``[B, N]``, false for padding."""
        return Prefix(
            self.backbone.eagle_linear(self.backbone.eagle_model(pixels, token_ids, places)),
            [],
            mask,
        )

    def refined(self, prefix: Prefix) -> Prefix:
        """Return what the action head makes of Eagle's features before it denoises."""
        head = self.action_head
        mask = additive_mask(prefix.mask[:, None], prefix.states.dtype)
        return self.with_keys(
            replace(prefix, states=head.vl_self_attention(head.vlln(prefix.states), mask))
        )

    def with_keys(self, prefix: Prefix) -> Prefix:
        return replace(
            prefix, keys_and_values=self.action_head.model.keys_and_values(prefix.states)
        )

    def velocity(
        self, prefix: Prefix, state: Tensor, x: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the velocity and the DiT's outputs for actions ``[B, H, hidden]``.

        The velocity ``E[noise - action | x]`` is float32 ``[B, H, action_dim]``. ``time``: ``[B]``,
        from 1 (noise) to 0 (action). GR00T's own time runs the other way, in buckets, and its
        velocity is the negative: this is the only place that knows.
        """
        head, config = self.action_head, self.config
        # times of steps are sums of float32 numbers, which may end just below a bucket
        bucket = ((1 - time) * config.time_buckets + 1e-2).floor().clamp(min=0)
        actions = head.action_encoder(x, bucket) + head.position_embedding.weight[: x.shape[1]]
        future = head.future_tokens.weight.expand(len(x), -1, -1)
        parts = [head.state_encoder(state[:, None]), future, actions]
        tokens = torch.cat([part.to(prefix.states.dtype) for part in parts], dim=1)
        mask = additive_mask(prefix.mask[:, None], tokens.dtype)
        states = head.model(tokens, prefix.keys_and_values, mask, bucket)[:, -x.shape[1] :]
        return -head.action_decoder(states).float(), states

"""Gradient checkpointing of repeated blocks: recompute activations in the backward pass.

It takes more time and far less memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import Policy


def repeated_blocks(network: nn.Module) -> list[nn.Module]:
    """Return the children of every ``nn.ModuleList`` (repeated layers); outer ones come first."""
    return [
        block
        for layers in network.modules()
        if isinstance(layers, nn.ModuleList)
        for block in layers
    ]


def checkpoint_blocks(policy: Policy) -> None:
    """Enable checkpointing of every block of the backbone, in place.

    Names, weights and results do not change. Raises UserError if the backbone has no such blocks.
    """
    blocks = repeated_blocks(policy.backbone)
    if not blocks:
        raise UserError(
            f"cluster.gradient_checkpointing=true: {policy.name} has no repeated blocks (nn.ModuleList), set it to false"
        )
    for block in blocks:
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # policies do not use the global generator, so there is no random state to restore
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run

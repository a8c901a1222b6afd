"""Activations of repeated blocks are computed again in the backward pass instead of kept: more time, far less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlinf_vla.protocols import Policy
from rlinf_vla.types import UserError


def repeated_blocks(network: nn.Module) -> list[nn.Module]:
    """Every child of an ``nn.ModuleList``, as networks keep their repeated layers; a block before those inside it."""
    return [block for layers in network.modules() if isinstance(layers, nn.ModuleList) for block in layers]


def checkpoint_blocks(policy: Policy) -> None:
    """Checkpoint every block of the backbone.

    Names, weights and results stay as they were. Raises UserError where the backbone has no such blocks.
    """
    blocks = repeated_blocks(policy.backbone)
    if not blocks:
        raise UserError(f"cluster.gradient_checkpointing=true: {policy.name} has no repeated blocks (nn.ModuleList), set it to false")
    for block in blocks:
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # policies draw nothing from the global generator, so there is no random state to restore
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run

"""Transformers' Llama layers with fused kernels on CUDA (``fused.py``), elsewhere with our RoPE."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from . import fused
from .rotation import rotate

_plain_rotary = modeling_llama.apply_rotary_pos_emb


class RMSNorm(modeling_llama.LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return (
            fused.rms_norm(x, self.weight, self.variance_epsilon)
            if fused.usable(x)
            else super().forward(x)
        )


class MLP(modeling_llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        if not fused.usable(x) or self.config.hidden_act != "silu":
            return super().forward(x)
        return self.down_proj(fused.silu_times(self.gate_proj(x), self.up_proj(x)))


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    if unsqueeze_dim != 1:
        return _plain_rotary(q, k, cos, sin, unsqueeze_dim)
    if fused.usable(q):
        return fused.rotate(q, k, cos, sin)
    cos, sin = (angles[:, None, :, : q.shape[-1] // 2] for angles in (cos, sin))
    return rotate(q, cos, sin), rotate(k, cos, sin)


def fuse(model: nn.Module) -> None:
    """Make the Llama layers in ``model`` use fused kernels; names and weights stay."""
    modeling_llama.apply_rotary_pos_emb = rotary
    classes: dict[type, Any] = {modeling_llama.LlamaRMSNorm: RMSNorm, modeling_llama.LlamaMLP: MLP}
    for module in model.modules():
        module.__class__ = classes.get(type(module), type(module))

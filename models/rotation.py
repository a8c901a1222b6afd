"""Rotary position embedding (RoPE), with fewer passes over memory than a formula of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    result = torch.empty_like(x)
    low, high = result.chunk(2, dim=-1)
    torch.mul(first, cos, out=low).sub_(second * sin)
    torch.mul(second, cos, out=high).add_(first * sin)
    return result


class _Rotation(torch.autograd.Function):
    """The gradient is rotated backwards, so nothing but the angles is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, -sin), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``[B, heads, N, D]``; element i is paired with i + D / 2.

    Computed in the dtype of ``cos`` and ``sin``, which are ``[B, 1, N, D / 2]``.
    """
    turn = _Rotation.apply if torch.is_grad_enabled() else _rotated
    return turn(x.to(cos.dtype), cos, sin).to(x.dtype)

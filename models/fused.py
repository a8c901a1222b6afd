"""Fused kernels on CUDA for what lies between matrix products: norms, rotations and gated MLPs.

They are those of liger-kernel, where it is installed (the extra ``cuda``). A kernel reads and
writes an activation once; PyTorch's operations for the same pass over it up to nine times, and
keep more for the backward pass. Sums are in float32, as in the operations that they replace, but
the last bit of a result can differ. ``cluster.fused_kernels=false`` does without.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.core.devices import allows_fused_kernels, set_fused_kernels


def usable(x: Tensor) -> bool:
    """Return whether the functions of this module can be called on tensors like ``x``."""
    return allows_fused_kernels(x.device) and installed()


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return ``x`` ``[..., D]`` divided by its root mean square, times ``offset + weight``.

    Without an offset the quotient is rounded to the dtype of ``x`` first, as in Llama.
    """
    if x.is_meta:
        return _CountedNorm.apply(x, weight)
    mode = "gemma" if offset else "llama"
    return kernel("rms_norm", "LigerRMSNormFunction").apply(x, weight, eps, offset, mode, False)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Apply RoPE to ``[B, heads, N, D]``, in place where their memory is ``[B, N, heads, D]``.

    ``cos`` and ``sin``: ``[B, N, D]``, or their first halves ``[B, N, D / 2]``. Computed in their
    dtype.
    """
    if q.is_meta:
        return q, k
    return kernel("rope", "LigerRopeFunction").apply(q, k, cos, sin, None, 1, q.shape[-1])


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``. A backward pass overwrites both."""
    return (
        _CountedProduct.apply(gate, up)
        if gate.is_meta
        else kernel("swiglu", "LigerSiLUMulFunction").apply(gate, up)
    )


def gelu_times(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``gelu(gate) * up``, by the tanh approximation. A backward pass overwrites both."""
    return (
        _CountedProduct.apply(gate, up)
        if gate.is_meta
        else kernel("geglu", "LigerGELUMulFunction").apply(gate, up)
    )


class _CountedNorm(torch.autograd.Function):
    """Allocates on the meta device what the norm's kernels allocate on CUDA, for memory counts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        _, weight, _ = ctx.saved_tensors
        return torch.empty_like(gradient), torch.empty_like(weight)


class _CountedProduct(torch.autograd.Function):
    """The same for gated products, whose backward pass overwrites the factors."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return ctx.saved_tensors


@contextmanager
def unused() -> Iterator[None]:
    """Within the context no fused kernels are used: a baseline runs as its authors publish it."""
    before = allows_fused_kernels(torch.device("cuda"))
    set_fused_kernels(False)
    try:
        yield
    finally:
        set_fused_kernels(before)


@functools.cache
def installed() -> bool:
    """Return whether liger-kernel can be imported."""
    return find_spec("liger_kernel") is not None and find_spec("triton") is not None


@functools.cache
def kernel(module: str, name: str) -> Any:
    """Return liger-kernel's autograd function ``name``."""
    return getattr(import_module(f"liger_kernel.ops.{module}"), name)

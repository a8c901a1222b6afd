"""A preallocated cache of keys and values, and the attention that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """For a single query cuDNN's attention returns other bits from call to call, on the same values
    (seen on an H200 with PyTorch 2.11)."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


class StaticCache:
    """Keys and values of ``capacity`` tokens per layer, allocated once.

    Implements the ``update`` that transformers' attention calls.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.filled = 0
        """Number of tokens in the buffers; the next ones are written after them."""
        self.buffers: list[Tensor] = []
        """Keys and values ``[2, B, heads, capacity, head_dim]`` of each layer."""

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Store ``[B, heads, N, head_dim]`` after the ``filled`` tokens; return all of them."""
        if layer == len(self.buffers):
            batch, heads, _count, head_dim = keys.shape
            self.buffers.append(keys.new_empty(2, batch, heads, self.capacity, head_dim))
        end = self.filled + keys.shape[2]
        buffer = self.buffers[layer]
        buffer[0, :, :, self.filled : end] = keys
        buffer[1, :, :, self.filled : end] = values
        return buffer[0, :, :, :end], buffer[1, :, :, :end]

"""What flow policies' networks share: an action expert reads a language model's keys and values.

Sources: openpi ``models_pytorch/pi0_pytorch.py`` and ``gemma_pytorch.py``; RLinf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf_vla.core.types import Tensors

from . import fused
from .rotation import rotate

KeysAndValues = list[tuple[Tensor, Tensor]]
"""Rotated keys and values ``[B, kv_heads, N, head_dim]`` of each layer."""
Velocity = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(``x`` ``[B, H, A]``, time ``[]`` or ``[B, H]``) -> the flow's velocity ``[B, H, A]``, and the
network's states."""

_ALIGNED = 8
_STATES = "prefix.states"
_KEYS = "prefix.keys"
_VALUES = "prefix.values"
_MASK = "prefix.mask"


@dataclass
class Prefix:
    """Encoded images and text: states ``[B, P, width]``, keys and values, mask bool ``[B, P]``."""

    states: Tensor
    keys_and_values: KeysAndValues
    mask: Tensor

    def pack(self, states: bool) -> Tensors:
        """Keys and values ``[B, layers, kv_heads, P, head_dim]``, mask; states with ``states``, or
        without keys."""
        if not self.keys_and_values:
            return {_STATES: self.states, _MASK: self.mask}
        keys, values = (
            torch.stack(tensors, dim=1) for tensors in zip(*self.keys_and_values, strict=True)
        )
        return {_KEYS: keys, _VALUES: values, _MASK: self.mask} | (
            {_STATES: self.states} if states else {}
        )

    @classmethod
    def unpack(cls, tensors: Tensors) -> Prefix | None:
        """Invert ``pack``; None if ``tensors`` hold no prefix. States not packed have width 0."""
        if _MASK not in tensors:
            return None
        if _KEYS not in tensors:
            return cls(tensors[_STATES], [], tensors[_MASK])
        keys, values, mask = tensors[_KEYS], tensors[_VALUES], tensors[_MASK]
        states = tensors.get(_STATES, keys.new_empty(*mask.shape, 0))
        return cls(states, list(zip(keys.unbind(1), values.unbind(1), strict=True)), mask)


def time_embedding(
    time: Tensor, dim: int, min_period: float = 4e-3, max_period: float = 4.0
) -> Tensor:
    """Embed times ``[...]`` as sin and cos of geometric periods ``[..., dim]``.

    In float64, as in openpi.
    """
    fraction = torch.linspace(0.0, 1.0, dim // 2, dtype=torch.float64, device=time.device)
    angles = time.double()[..., None] * (
        2 * math.pi / (min_period * (max_period / min_period) ** fraction)
    )
    return torch.cat([angles.sin(), angles.cos()], dim=-1).float()


def with_time(
    actions: Tensor, time: Tensor, min_period: float = 4e-3, max_period: float = 4.0
) -> Tensor:
    """Append its time's embedding to each action ``[B, H, width]``: ``[B, H, 2 width]``.

    ``time``: ``[B]``, or of each action ``[B, H]``.
    """
    embedded = time_embedding(time, actions.shape[-1], min_period, max_period).to(actions.dtype)
    return torch.cat(
        [actions, (embedded if time.ndim == 2 else embedded[:, None]).expand_as(actions)], dim=-1
    )


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask ``[B, 1, N, M]`` to add to scores; ``visible``: bool ``[B, N, M]``."""
    # a row without visible tokens (padding, unused) attends to all: softmax over none is NaN
    visible = visible | ~visible.any(-1, keepdim=True)
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, float("-inf")
    )[:, None]


def rotations(positions: Tensor, head_dim: int) -> Tensor:
    """Return RoPE cos and sin, float32 ``[2, B, 1, N, head_dim / 2]`` (base 10000)."""
    frequencies = 10000.0 ** -(
        torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    )
    angles = positions[:, None, :, None].float() * frequencies
    return torch.stack([angles.cos(), angles.sin()])


def rotate_both(q: Tensor, k: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
    """Apply RoPE to queries and keys, perhaps in place."""
    if fused.usable(q):
        cos, sin = rotation[:, :, 0]
        return fused.rotate(q, k, cos, sin)
    return rotate(q, *rotation), rotate(k, *rotation)


def few_queries_attention(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor
) -> Tensor:
    """Return attention ``[B, heads, N, D]`` as two matrix products, for few queries on a GPU.

    Heads that share keys are rows of one product, so there is much to compute at once, where a
    fused kernel runs over all keys in a few units of the GPU. ``keys``, ``values``: ``[B,
    kv_heads, M_i, D]``, one after the other; ``mask``: additive ``[B, 1, N, M]``.
    """
    batch, heads, _rows, width = q.shape
    shared = keys[0].shape[1]
    pad = -mask.shape[-1] % _ALIGNED  # rows of other lengths take slower products
    rest = q.new_zeros(batch, shared, pad, width)
    k, v = (torch.cat([*parts, rest], dim=2).flatten(0, 1) for parts in (keys, values))
    bias = F.pad(mask.to(q.dtype), (0, pad), value=float("-inf")).expand(-1, heads, -1, -1)
    scores = bias.clone(memory_format=torch.contiguous_format).view(batch * shared, -1, k.shape[1])
    scores = scores.baddbmm_(
        q.reshape(batch * shared, -1, width), k.transpose(1, 2), alpha=width**-0.5
    )
    return torch.bmm(scores.softmax(-1), v).view(q.shape)


def mlp(input_dim: int, *sizes: int, activation: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in zip((input_dim, *sizes), sizes, strict=False):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


class NoiseHead(nn.Module):
    """Standard deviations of flow_noise from the expert's states, between ``low`` and ``high``.

    Source: RLinf's ``explore_noise_net``.
    """

    def __init__(self, width: int, action_dim: int, low: float, high: float) -> None:
        super().__init__()
        self.mlp = mlp(width, 128, 64, action_dim, activation=nn.Tanh)
        self.low = 2 * math.log(low)
        self.high = 2 * math.log(high)

    def forward(self, states: Tensor) -> Tensor:
        """Return standard deviations ``[B, H, action_dim]``."""
        log_variance = self.low + (self.high - self.low) * (self.mlp(states.float()).tanh() + 1) / 2
        return (0.5 * log_variance).exp()

"""What π₀'s action expert needs of images, text and state; as tensors too, to be kept or sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_vla.types import Tensors

from .network import Prefix

_STATES, _KEYS, _VALUES, _MASK = "prefix.states", "prefix.keys", "prefix.values", "prefix.mask"


@dataclass
class Features:
    prefix: Prefix
    state: Tensor
    critic: Tensor
    """What the value head reads, ``[B, width]``."""


def is_kept(tensors: Tensors) -> bool:
    return _KEYS in tensors


def keep(prefix: Prefix, states: bool) -> Tensors:
    """Keys and values ``[B, layers, kv_heads, P, head_dim]``, the mask ``[B, P]`` and, where asked for, the states ``[B, P, width]``."""
    keys, values = (torch.stack(each, dim=1) for each in zip(*prefix.keys_and_values, strict=True))
    return {_KEYS: keys, _VALUES: values, _MASK: prefix.mask} | ({_STATES: prefix.states} if states else {})


def kept(tensors: Tensors) -> Prefix:
    """States that were not kept have width 0."""
    keys, values, mask = tensors[_KEYS], tensors[_VALUES], tensors[_MASK]
    states = tensors.get(_STATES, keys.new_empty(*mask.shape, 0))
    return Prefix(states, list(zip(keys.unbind(1), values.unbind(1), strict=True)), mask)

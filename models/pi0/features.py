"""Inputs of π₀'s action expert from images, text and state, and their packing as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_vla.core.types import Tensors

from .network import Prefix

_STATES, _KEYS, _VALUES, _MASK = "prefix.states", "prefix.keys", "prefix.values", "prefix.mask"


@dataclass
class Features:
    prefix: Prefix
    state: Tensor
    critic: Tensor
    """Input of the value head, ``[B, width]``."""


def is_kept(tensors: Tensors) -> bool:
    return _KEYS in tensors


def keep(prefix: Prefix, states: bool) -> Tensors:
    """Pack a prefix: keys and values ``[B, layers, kv_heads, P, head_dim]``, mask ``[B, P]``, and
    with ``states`` the states ``[B, P, width]``."""
    keys, values = (torch.stack(each, dim=1) for each in zip(*prefix.keys_and_values, strict=True))
    return {_KEYS: keys, _VALUES: values, _MASK: prefix.mask} | ({_STATES: prefix.states} if states else {})


def kept(tensors: Tensors) -> Prefix:
    """Unpack a prefix; states that were not packed have width 0."""
    keys, values, mask = tensors[_KEYS], tensors[_VALUES], tensors[_MASK]
    states = tensors.get(_STATES, keys.new_empty(*mask.shape, 0))
    return Prefix(states, list(zip(keys.unbind(1), values.unbind(1), strict=True)), mask)

"""Features of a split policy in messages, read safely from anybody."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlinf_vla.core.types import Tensors
from rlinf_vla.features.serving.array_messages import LIMITS, MessageError

_SENT = {torch.bfloat16: torch.int16}
"""dtypes that NumPy lacks -> the dtype in which their bits travel."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.bool,
        torch.uint8,
        torch.int32,
        torch.int64,
    )
}


@dataclass(frozen=True)
class Described:
    """dtype and shape of a feature without its leading dimension."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


def description(features: Tensors) -> dict[str, Any]:
    """Return what ``read_description`` reads, in plain values."""
    return {
        name: {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape[1:])}
        for name, value in features.items()
    }


def read_description(said: Any) -> dict[str, Described]:
    """Return the description of features, by name. Raises MessageError."""
    if not isinstance(said, dict) or not 1 <= len(said) <= LIMITS.arrays:
        raise MessageError(f"features are not described by a map of 1 to {LIMITS.arrays} entries")
    descriptions: dict[str, Described] = {}
    for name, entry in said.items():
        shape, dtype = (
            (entry.get("shape"), entry.get("dtype")) if isinstance(entry, dict) else (None, None)
        )
        if (
            not isinstance(shape, list)
            or len(shape) >= LIMITS.dims
            or any(type(size) is not int or size < 0 for size in shape)
        ):
            raise MessageError(
                f"the shape of a feature is a list of fewer than {LIMITS.dims} sizes"
            )
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise MessageError(
                f"a feature of dtype {str(dtype)[:20]!r}, known are {', '.join(_DTYPES)}"
            )
        descriptions[str(name)] = Described(_DTYPES[dtype], tuple(shape))
    if sum(feature.nbytes for feature in descriptions.values()) > LIMITS.size:
        raise MessageError(f"the features of a row take more than {LIMITS.size} bytes")
    return descriptions


def as_arrays(features: Tensors) -> dict[str, NDArray[Any]]:
    """Return features on the CPU as arrays that a message can hold."""
    return {
        name: value.contiguous().view(_SENT.get(value.dtype, value.dtype)).numpy()
        for name, value in features.items()
    }


def read_features(said: Any, described: Mapping[str, Described], rows: int) -> Tensors:
    """Return the features of ``rows`` rows that a message holds as described.

    Raises MessageError for other names, shapes or dtypes, and for numbers that are not finite.
    """
    if not isinstance(said, dict) or said.keys() != described.keys():
        names = (
            ", ".join(sorted(map(str, said)))[:100]
            if isinstance(said, dict)
            else type(said).__name__
        )
        raise MessageError(
            f"features {names or 'without entries'}: {', '.join(described)} are expected"
        )
    features: Tensors = {}
    for name, feature in described.items():
        value = said[name]
        sent = torch.empty(0, dtype=_SENT.get(feature.dtype, feature.dtype)).numpy().dtype
        if (
            not isinstance(value, np.ndarray)
            or value.dtype != sent
            or value.shape != (rows, *feature.shape)
        ):
            kind = (
                f"{value.dtype} {list(value.shape)}"
                if isinstance(value, np.ndarray)
                else type(value).__name__
            )
            raise MessageError(
                f"feature {name} is {kind}: {sent} {[rows, *feature.shape]} is expected"
            )
        tensor = torch.from_numpy(value.copy()).view(feature.dtype)
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise MessageError(f"feature {name} holds a number that is not finite")
        features[name] = tensor
    return features

"""Check the statistics of a checkpoint, by which states and actions are scaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError

FIX = "copy the checkpoint again"


def read_numbers(statistics: Any, names: Sequence[str], where: str) -> list[Tensor]:
    """Return the statistics of these ``names``, float64 ``[D]`` each.

    ``where`` begins messages. Raises UserError unless they are lists of finite numbers, all of one
    length; a standard deviation must not be negative.
    """
    if not isinstance(statistics, Mapping) or (
        absent := [name for name in names if name not in statistics]
    ):
        lacking = " and ".join(absent) if isinstance(statistics, Mapping) else "all numbers"
        raise UserError(
            f"{where} needs {' and '.join(names)}, the checkpoint's statistics lack {lacking}: {FIX}"
        )
    for name in names:
        values = statistics[name]
        if (
            not isinstance(values, list)
            or not values
            or not all(isinstance(value, int | float) for value in values)
        ):
            raise UserError(f"{where}: {name} is not a list of numbers: {FIX}")
        if len(values) != (count := len(statistics[names[0]])):
            raise UserError(
                f"{where}: {name} has {len(values)} numbers, {names[0]} has {count}: {FIX}"
            )
    tensors = [
        torch.tensor(
            [float(value) for value in statistics[name]], dtype=torch.float64, device="cpu"
        )
        for name in names
    ]
    for name, tensor in zip(names, tensors, strict=True):
        if not tensor.isfinite().all():
            raise UserError(f"{where}: {name} has NaN or infinite numbers: {FIX}")
        if name == "std" and (tensor < 0).any():
            raise UserError(f"{where}: std has negative numbers: {FIX}")
    return tensors


def read_range(statistics: Any, names: tuple[str, str], where: str) -> list[Tensor]:
    """Return the low and the high end of a range as ``read_numbers``. Raises UserError unless each
    is in order."""
    low, high = read_numbers(statistics, names, where)
    if (wrong := (low > high).nonzero()).numel():
        i = int(wrong[0])
        raise UserError(
            f"{where}: {names[0]}={low[i]:g} is above {names[1]}={high[i]:g} in dimension {i}: {FIX}"
        )
    return [low, high]


def read_mask(statistics: Mapping[str, Any], count: int, where: str) -> Tensor:
    """Return which of ``count`` dimensions are scaled, bool ``[count]``; all if there is no mask.

    Raises UserError.
    """
    mask = statistics.get("mask", [True] * count)
    if not isinstance(mask, list) or not all(isinstance(value, bool) for value in mask):
        raise UserError(
            f"{where}: mask must be a list of true and false: write true for 1 and false for 0"
        )
    if len(mask) != count:
        raise UserError(
            f"{where}: mask has {len(mask)} entries, the other statistics have {count}: {FIX}"
        )
    return torch.tensor(mask, device="cpu")

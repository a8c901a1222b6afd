"""Convert states and actions between the robot's units and the model's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlinf_vla.config.errors import UserError

from .statistics import FIX, read_numbers, read_range

RANGES = {"QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90"), "MIN_MAX": ("min", "max")}
"""Modes that map this range to [-1, 1]; names as in lerobot."""
DEVIATIONS = 4.0
"""Standard deviations beyond which values of any data are rare: 1 in 16 at most (Chebyshev), 1 in
16,000 of normally distributed ones."""


class Normalizer(nn.Module):
    """Robot units to model units.

    ``mode``: ``MEAN_STD`` (openpi's π₀), one of RANGES (``QUANTILES`` in its π₀.₅) or ``IDENTITY``.
    ``epsilon`` is added to the standard deviation or range. Raises UserError.
    """

    def __init__(
        self,
        statistics: dict[str, Any],
        mode: str,
        epsilon: float = 1e-6,
        what: str = "state or actions",
    ) -> None:
        super().__init__()
        if mode not in (*RANGES, "MEAN_STD", "IDENTITY"):
            raise UserError(f"normalisation {mode} is not known: choose another model.checkpoint")
        where = f"normalisation {mode} of {what}"
        if not isinstance(epsilon, int | float) or not 0 <= epsilon < 1:
            raise UserError(f"{where}: eps={epsilon} is not a number from 0 to 1: {FIX}")
        self.to_range = mode in RANGES
        self.limit = 1.0 if self.to_range else DEVIATIONS if mode == "MEAN_STD" else None
        """Magnitude from which a normalised value is beyond the statistics; None: unknown."""
        if self.to_range:
            low, high = read_range(statistics, RANGES[mode], where)
            offset = low
            scale = high - low
        else:
            offset, scale = read_numbers(statistics, ("mean", "std"), where)
        if mode == "IDENTITY":
            offset = torch.zeros_like(offset)
            scale = torch.ones_like(scale)
            epsilon = 0.0
        self.register_buffer("offset", offset, persistent=False)
        self.register_buffer("scale", scale + epsilon, persistent=False)

    offset: Tensor
    scale: Tensor

    def __len__(self) -> int:
        return len(self.offset)

    def forward(self, values: Tensor) -> Tensor:
        """Normalise ``[..., D]``; statistics of further dimensions are ignored."""
        count = values.shape[-1]
        unit = (values.double() - self.offset[:count]) / self.scale[:count]
        return (unit * 2 - 1 if self.to_range else unit).to(values.dtype)

    def inverse(self, values: Tensor) -> Tensor:
        count = values.shape[-1]
        unit = (values.double() + 1) / 2 if self.to_range else values.double()
        return (unit * self.scale[:count] + self.offset[:count]).to(values.dtype)


def relative(actions: Tensor, state: Tensor, dimensions: list[int]) -> Tensor:
    """Subtract the chunk's first state ``[..., S]`` from actions ``[..., C, D]``; robot units.

    Source: openpi ``DeltaActions``.
    """
    moved = actions.clone()
    for index in dimensions:  # a list of indices would be copied to a GPU at each call
        moved[..., index] -= state[..., None, index]
    return moved


def absolute(actions: Tensor, state: Tensor, dimensions: list[int]) -> Tensor:
    """Invert :func:`relative`, after un-normalisation. Source: openpi ``AbsoluteActions``."""
    moved = actions.clone()
    for index in dimensions:
        moved[..., index] += state[..., None, index]
    return moved

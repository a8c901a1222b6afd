"""Prepare images, state and prompts for π₀, and convert its actions back.

Sources: openpi ``transforms.py``, ``models/tokenizer.py``, ``image_tools.py``.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.images import padded

from ..files import check_prompt

NORM_STATS = "norm_stats.json"
STATE_BINS = 256
RANGES = {"QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90"), "MIN_MAX": ("min", "max")}
"""Modes that map this range to [-1, 1]; names as in lerobot."""


def copy_statistics(source: Path, target: Path) -> None:
    """Copy the normalisation statistics of all datasets of a checkpoint."""
    for path in source.glob(f"**/{NORM_STATS}"):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def resize_with_pad(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize uint8 ``[B, H, W, 3]`` to ``[B, 3, *size]``, bilinear as Pillow, with black bars."""
    return padded(images, size).permute(0, 3, 1, 2).contiguous()


def to_unit_range(images: Tensor) -> Tensor:
    """Convert uint8 to float32 in [-1, 1]."""
    return images.float() / 255 * 2 - 1


class Normalizer(nn.Module):
    """Robot units to model units.

    ``mode``: ``MEAN_STD`` (openpi's π₀), one of RANGES (``QUANTILES`` in its π₀.₅) or ``IDENTITY``.
    ``epsilon`` is added to the standard deviation or range. Raises UserError.
    """

    def __init__(self, statistics: dict[str, Any], mode: str, epsilon: float = 1e-6) -> None:
        super().__init__()
        if mode not in (*RANGES, "MEAN_STD", "IDENTITY"):
            raise UserError(f"normalisation {mode} is not known: choose another model.checkpoint")
        names = RANGES.get(mode, ("mean", "std"))
        if absent := [name for name in names if name not in statistics]:
            raise UserError(f"normalisation {mode} needs {' and '.join(names)}, the checkpoint's statistics lack {' and '.join(absent)}")
        offset, scale = (torch.tensor(statistics[name], dtype=torch.float64) for name in names)
        self.to_range = mode in RANGES
        scale = scale - offset if self.to_range else scale
        if mode == "IDENTITY":
            offset, scale, epsilon = torch.zeros_like(offset), torch.ones_like(scale), 0.0
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


def delta_dimensions(mask: list[int], action_dim: int, state_dim: int) -> list[int]:
    """Return the action dimensions relative to the state; ``mask`` as ``delta_mask``."""
    flags = [count > 0 for count in mask for _ in range(abs(count))]
    dimensions = [i for i, flag in enumerate(flags) if flag]
    if len(flags) > action_dim or any(i >= state_dim for i in dimensions):
        raise UserError(
            f"model.options.delta_mask={mask} covers {len(flags)} dimensions, the checkpoint's {NORM_STATS} has {action_dim} of actions "
            f"and {state_dim} of the state: give one number per run of dimensions, such as [{action_dim - 1},-1]"
        )
    return dimensions


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


class PromptEncoder:
    """Encode instructions, and optionally the normalised state, as ids padded on the right."""

    def __init__(self, tokenizer: Tokenizer, length: int, bos_id: int, with_state: bool, state_dim: int = 0) -> None:
        """``state_dim``: numbers of the state in the text, padded with 0; fewer have no effect."""
        self.tokenizer, self.length, self.bos_id, self.with_state, self.state_dim = tokenizer, length, bos_id, with_state, state_dim

    def texts(self, instruction: str, state: Tensor) -> list[str]:
        """Return the pieces of text to tokenise.

        ``state``: ``[S]``, normalised; put into 256 bins on [-1, 1], and -1 below them.
        """
        clean = instruction.strip().replace("_", " ").replace("\n", " ")
        if not self.with_state:
            return [clean, "\n"]
        padded = np.pad(state.double().numpy(), (0, max(self.state_dim - len(state), 0)))
        bins = np.digitize(padded, np.linspace(-1, 1, STATE_BINS + 1)[:-1]) - 1
        return [f"Task: {clean}, State: {' '.join(map(str, bins))};\nAction: "]

    def ids(self, instruction: str, state: Tensor) -> list[int]:
        """Return unpadded ids."""
        pieces = [self.tokenizer.encode(text, add_special_tokens=False).ids for text in self.texts(instruction, state)]
        return [self.bos_id, *(token for piece in pieces for token in piece)]

    def __call__(self, instructions: list[str], states: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids int64 and mask bool ``[B, length]``. Raises UserError for longer prompts."""
        ids = torch.zeros(len(instructions), self.length, dtype=torch.int64)
        mask = torch.zeros(len(instructions), self.length, dtype=torch.bool)
        for row, (instruction, state) in enumerate(zip(instructions, states.cpu(), strict=True)):
            tokens = self.ids(instruction, state)
            check_prompt(instruction, len(tokens), self.length)
            ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), True
        return ids, mask

"""Prepare images, state and prompts for π₀, and convert its actions back.

Sources: openpi ``transforms.py``, ``models/tokenizer.py``, ``image_tools.py``.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.images import padded

from ..files import padded_prompts

NORM_STATS = "norm_stats.json"
STATE_BINS = 256


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


class PromptEncoder:
    """Encode instructions, and optionally the normalised state, as ids padded on the right."""

    def __init__(
        self, tokenizer: Tokenizer, length: int, bos_id: int, with_state: bool, state_dim: int = 0
    ) -> None:
        """``state_dim``: numbers of the state in the text, padded with 0; fewer have no effect."""
        self.tokenizer = tokenizer
        self.length = length
        self.bos_id = bos_id
        self.with_state = with_state
        self.state_dim = state_dim

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
        pieces = [
            self.tokenizer.encode(text, add_special_tokens=False).ids
            for text in self.texts(instruction, state)
        ]
        return [self.bos_id, *(token for piece in pieces for token in piece)]

    def __call__(self, instructions: list[str], states: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids int64 and mask bool ``[B, length]``. Raises UserError for longer prompts."""
        # only what is read is fetched: it would wait for the GPU
        pairs = zip(instructions, states.cpu() if self.with_state else states, strict=True)
        return padded_prompts(
            [(instruction, self.ids(instruction, state)) for instruction, state in pairs],
            self.length,
        )

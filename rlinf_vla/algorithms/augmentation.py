"""Augment training images by random shifts."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_vla.core.transitions import Transitions
from rlinf_vla.core.types import Inputs


def shift_images(
    inputs: Inputs, pad: int, generator: torch.Generator, batch: Transitions | None = None
) -> Inputs:
    """Shift all images of ``image.*`` at random (DrQ, Kostrikov et al. 2021); ``pad=0``: off.

    ``batch``: to which ``inputs`` belong, and for all rows of which shifts are drawn.
    """
    moved = dict(inputs)
    for name in inputs if pad else ():
        if name.startswith("image."):
            rows = len(inputs[name]) if batch is None else len(batch)
            shifts = torch.randint(0, 2 * pad + 1, (rows, 2), generator=generator)
            shifts = shifts if batch is None else batch.own(shifts)
            moved[name] = random_shift(inputs[name], shifts.to(inputs[name].device), pad)
    return moved


def random_shift(images: Tensor, shifts: Tensor, pad: int) -> Tensor:
    """Shift images, uint8 ``[B, H, W, 3]``, each by its row of ``shifts``, int64 ``[B, 2]``.

    A shift is in 0 ... 2 ``pad`` pixels; ``pad`` is none. Border pixels are repeated.
    """
    batch, height, width, channels = images.shape
    rows = (shifts[:, :1] + torch.arange(height, device=images.device) - pad).clamp(0, height - 1)
    columns = (shifts[:, 1:] + torch.arange(width, device=images.device) - pad).clamp(0, width - 1)
    image = torch.arange(batch, device=images.device)[:, None, None]
    pixels = (image * height + rows[:, :, None]) * width + columns[:, None, :]
    return images.reshape(-1, channels).index_select(0, pixels.flatten()).view_as(images)

"""What images are put through before they are learnt from."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_vla.types import Inputs


def shift_images(inputs: Inputs, pad: int, generator: torch.Generator) -> Inputs:
    """Every ``image.*`` of ``inputs`` at random shifts of its own (DrQ, Kostrikov et al. 2021); ``pad=0``: none."""
    moved = dict(inputs)
    for name in inputs if pad else ():
        if name.startswith("image."):
            shifts = torch.randint(0, 2 * pad + 1, (len(inputs[name]), 2), generator=generator)
            moved[name] = random_shift(inputs[name], shifts.to(inputs[name].device), pad)
    return moved


def random_shift(images: Tensor, shifts: Tensor, pad: int) -> Tensor:
    """uint8 ``[B, H, W, 3]``, each moved by its own ``shifts`` (int64 ``[B, 2]``, 0 ... 2 pad) in a border repeated ``pad`` times."""
    batch, height, width, channels = images.shape
    rows = (shifts[:, :1] + torch.arange(height, device=images.device) - pad).clamp(0, height - 1)
    columns = (shifts[:, 1:] + torch.arange(width, device=images.device) - pad).clamp(0, width - 1)
    image = torch.arange(batch, device=images.device)[:, None, None]
    pixels = (image * height + rows[:, :, None]) * width + columns[:, None, :]
    return images.reshape(-1, channels).index_select(0, pixels.flatten()).view_as(images)

"""Operations that augment images, for the augmentation of a model's official trainer.

Every operation is elementwise, so the images of a row depend on neither the other rows of its
micro-batch nor the number of trainer ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def bilinear(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Sample float32 ``[B, 3, H, W]`` at ``rows`` and ``columns`` of pixels, float64 ``[B, h, w]``.

    Outside the image, pixels are 0.
    """
    height, width = images.shape[2:]
    top, left = rows.floor(), columns.floor()
    flat = images.flatten(2)
    total = torch.zeros_like(images[:, :, :1, :1]).expand(-1, -1, *rows.shape[1:])
    for row, column in ((top + i, left + j) for i in (0, 1) for j in (0, 1)):
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        weight = torch.where(inside, (1 - (rows - row).abs()) * (1 - (columns - column).abs()), 0)
        index = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
        picked = flat.gather(2, index.long().flatten(1)[:, None].expand(-1, flat.shape[1], -1))
        total = total + weight.float()[:, None] * picked.view_as(total)
    return total


def hsv(pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return hue (a share of the circle), saturation and value, ``[B, H, W]``, of RGB in [0, 1]."""
    value, largest = pixels.max(dim=1)
    chroma = value - pixels.amin(dim=1)
    after = [pixels.roll(-turn, 1).gather(1, largest[:, None])[:, 0] for turn in (1, 2)]
    hue = torch.where(chroma == 0, 0, (2 * largest + (after[0] - after[1]) / chroma) / 6)
    return hue, torch.where(value == 0, 0, chroma / value), value


def rgb(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Return RGB ``[B, 3, H, W]``; the inverse of ``hsv``. ``hue`` counts modulo 1."""
    channels = 5 - 2 * torch.arange(3, device=hue.device)[:, None, None]
    sector = (channels + 6 * hue[:, None]) % 6
    part = torch.minimum(sector, 4 - sector).clamp(0, 1)
    return value[:, None] - (value * saturation)[:, None] * part

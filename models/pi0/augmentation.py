"""Image augmentation of openpi's trainer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlinf_vla.core.protocols import Noise

from ..augmentation import bilinear, hsv, rgb


def openpi_augmented(images: Tensor, noise: Noise, moves: bool) -> Tensor:
    """Augment images as openpi's ``preprocess_observation`` does with augmax 0.3.4 and 0.4.1.

    ``moves``, for cameras that are not on a wrist: a random crop of 95 % of each side, resized
    back, and a rotation within 5 degrees, in one bilinear sampling; black outside the image. Then,
    with probability 0.5, a jitter of value (brightness 0.3, contrast 0.4) and hue (0.1) in HSV.
    augmax computes the change of saturation and discards it.

    ``images``: ``[B, 3, H, W]``, 0 to 255. Returns float32 of the same shape and range.
    """
    pixels = images.float() / 255
    if moves:
        drawn = noise.uniform(3).double()
        sides = images.shape[2:]
        centres = [(side - 1) / 2 for side in sides]
        places = [torch.arange(side, device=images.device) - side / 2 + 0.5 for side in sides]
        down, right = places[0].double()[:, None], places[1].double()
        angle = torch.deg2rad(10 * drawn[:, 2] - 5)[:, None, None]
        turned = (
            angle.cos() * down + angle.sin() * right,
            angle.cos() * right - angle.sin() * down,
        )
        rows, columns = (
            place * (int(0.95 * side) / side)
            + (2 * offset - 1)[:, None, None] * ((side - int(0.95 * side)) / 2)
            + centre
            for place, side, offset, centre in zip(
                turned, sides, drawn[:, :2].T, centres, strict=True
            )
        )
        pixels = bilinear(pixels, rows, columns)
    drawn = noise.uniform(4)[..., None, None]
    brightness, contrast, hue_shift = (
        strength * (2 * drawn[:, index] - 1) for index, strength in ((1, 0.3), (2, 0.4), (3, 0.1))
    )
    hue, saturation, value = hsv(pixels)
    value = _contrast(_brightness(value, brightness), contrast)
    jittered = rgb(hue + hue_shift, saturation, value)
    return torch.where(drawn[:, :1] < 0.5, jittered, pixels) * 255


def _brightness(value: Tensor, amount: Tensor) -> Tensor:
    """Move ``value`` towards 0 or 1, as augmax's ``adjust_brightness``."""
    return torch.where(amount < 0, value * (1 + amount), value * (1 - amount) + amount)


def _contrast(value: Tensor, amount: Tensor) -> Tensor:
    """Bend ``value`` around 0.5 by an invertible curve of three lines, as ``adjust_contrast``."""
    slant = ((amount.double() + 1) * (math.pi / 4)).tan().float()
    low = slant / (2 * (1 + slant))
    bent = torch.where(value < low, value / slant, slant * (value - 0.5) + 0.5)
    return torch.where(value > 1 - low, value / slant + 1 - 1 / slant, bent)

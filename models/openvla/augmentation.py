"""Image augmentation of OpenVLA's and OpenVLA-OFT's trainers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlinf_vla.core.protocols import Noise

from ..augmentation import bilinear, hsv, rgb
from .processor import CROP_AREA

_FIXED = 2**22
"""Levels between 0 and 1 in which a mean is summed: exactly, and so in any order."""


def prismatic_augmented(images: Tensor, noise: Noise) -> Tensor:
    """Augment images as ``image_aug`` of OpenVLA's and OpenVLA-OFT's trainers does, by dlimp.

    In this order, and clipped after each: a random crop of ``CROP_AREA``, resized back (bilinear);
    brightness +-0.2; contrast 0.8 to 1.2 about each channel's mean; saturation 0.8 to 1.2; hue
    +-0.05. dlimp draws both offsets of the crop from one seed, so it lies on the diagonal.

    ``images``: uint8 ``[B, 3, H, W]``. Returns the same.
    """
    offset, brightness, contrast, saturate, shift = (
        drawn[:, None, None] for drawn in noise.uniform(5).T
    )
    crop = math.sqrt(CROP_AREA)
    rows, columns = (
        (
            offset.double() * (1 - crop)
            + crop * torch.arange(side, device=images.device) / (side - 1)
        )
        * (side - 1)
        for side in images.shape[2:]
    )
    height, width = images.shape[2:]
    rows, columns = (
        rows.transpose(1, 2).expand(-1, height, width),
        columns.expand(-1, height, width),
    )
    pixels = bilinear(images.float() / 255, rows, columns).clamp(0, 1)
    pixels = (pixels + (0.4 * brightness - 0.2)[:, None]).clamp(0, 1)
    sums = (pixels * _FIXED).round().long().sum((2, 3), keepdim=True)
    means = (sums.double() / (_FIXED * height * width)).float()
    pixels = ((pixels - means) * (0.8 + 0.4 * contrast)[:, None] + means).clamp(0, 1)
    hue, saturation, value = hsv(pixels)
    saturation = (saturation * (0.8 + 0.4 * saturate)).clamp(0, 1)
    pixels = rgb(hue + 0.1 * shift - 0.05, saturation, value).clamp(0, 1)
    return (pixels * 255.5).clamp(max=255).byte()  # truncates, as tf.image.convert_image_dtype

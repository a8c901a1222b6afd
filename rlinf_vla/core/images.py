"""Resize images to a model's input size."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import interpolate


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize uint8 ``[B, H, W, 3]`` to uint8 ``[B, *size, 3]``; the aspect ratio may change.

    Bilinear with antialiasing, equal to Pillow's up to rounding.
    """
    if images.shape[1:3] == size:
        return images
    planes = images.permute(0, 3, 1, 2)
    planes = planes if planes.device.type == "cpu" else planes.float()  # only the CPU interpolates uint8
    return interpolate(planes, size, mode="bilinear", antialias=True).round().to(images.dtype).permute(0, 2, 3, 1).contiguous()

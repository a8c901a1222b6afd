"""Pictures in the size that a model wants."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import interpolate


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 ``[B, H, W, 3]`` to uint8 ``[B, *size, 3]``: bilinear, antialiased (as Pillow's, to a rounding), whatever the aspect ratio."""
    if images.shape[1:3] == size:
        return images
    planes = images.permute(0, 3, 1, 2)
    planes = planes if planes.device.type == "cpu" else planes.float()  # elsewhere there is none of uint8
    return interpolate(planes, size, mode="bilinear", antialias=True).round().to(images.dtype).permute(0, 2, 3, 1).contiguous()

"""The published picture of PutOnPlateInScene25: what is rendered, before a photograph.

As RLinf's tasks at a3816b59 compute it; ``Texture`` and ``Whole`` disturb it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from .tasks import PHOTOGRAPH

HEIGHT, WIDTH = PHOTOGRAPH


def read(path: Path, scale: int = 1) -> Tensor:
    """Read a picture as uint8 ``[480 * scale, 640 * scale, 3]``, RGB."""
    import cv2
    import numpy as np

    pixels = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR)
    if pixels is None:
        raise ValueError(f"{path} is not a picture")
    resized = cv2.resize(pixels, (WIDTH * scale, HEIGHT * scale))
    return torch.from_numpy(cv2.cvtColor(resized, cv2.COLOR_BGR2RGB))


def before_photographs(rendered: Tensor, shown: Tensor, photographs: Tensor) -> Tensor:
    """Replace what is not ``shown``, bool ``[N, H, W]``; pictures are uint8 ``[N, H, W, 3]``."""
    return torch.where(shown[..., None], rendered, photographs)


def box(shown: Tensor) -> tuple[int, int, int, int] | None:
    """First and last row and column of a mask ``[H, W]``; None if it is empty."""
    rows, columns = (shown.any(dim=axis).nonzero()[:, 0].tolist() for axis in (1, 0))
    return (rows[0], rows[-1], columns[0], columns[-1]) if rows else None


def with_texture(picture: Tensor, shown: Tensor, texture: Tensor, share: float) -> Tensor:
    """Mix ``texture``, scaled to the box of ``shown``, into what is shown: ``[H, W, 3]`` each."""
    if share == 0 or (bounds := box(shown)) is None:
        return picture
    top, bottom, left, right = bounds
    size = bottom - top + 1, right - left + 1
    scaled = interpolate(
        texture.permute(2, 0, 1)[None].float(), size, mode="bilinear", align_corners=False
    )
    part = picture[top : bottom + 1, left : right + 1]
    mixture = mixed(part, scaled[0].permute(1, 2, 0), share)
    result = picture.clone()
    result[top : bottom + 1, left : right + 1] = torch.where(
        shown[top : bottom + 1, left : right + 1, None], mixture, part
    )
    return result


def with_window(picture: Tensor, shown: Tensor, texture: Tensor, share: float) -> Tensor:
    """Mix a window of a texture of twice the size into a whole picture ``[H, W, 3]``.

    The window begins at the middle of the box of ``shown``.
    """
    if share == 0 or (bounds := box(shown)) is None:
        return picture
    top, bottom, left, right = bounds
    x = min(max((left + right) // 2, 1), WIDTH - 1)
    y = min(max((top + bottom) // 2, 1), HEIGHT - 1)
    return mixed(picture, texture[y : y + HEIGHT, x : x + WIDTH], share)


def mixed(picture: Tensor, texture: Tensor, share: float) -> Tensor:
    """Return uint8 values, cut and not rounded."""
    mixture = picture.float() * (1 - share) + texture.float() * share
    return mixture.clamp(0, 255).to(torch.uint8)


@cache
def stacked(paths: tuple[Path, ...], scale: int = 1) -> Tensor:
    """Read pictures ``[K, H, W, 3]``, once in a process: each episode on a CPU has a new scene."""
    return torch.stack([read(path, scale) for path in paths])

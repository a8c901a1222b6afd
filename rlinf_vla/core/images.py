"""Resize images to a model's input size, and pass them through JPEG."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from rlinf_vla.core.devices import own_cores
from rlinf_vla.core.jpeg import round_trip
from rlinf_vla.core.observation_features import camera, picture

CODERS = 8
"""Most threads that pass images through JPEG."""
FARTHEST_MM = 4000
"""Distances of random pictures are below it."""


def blank(cameras: Mapping[str, tuple[int, int]], rows: int) -> dict[str, Tensor]:
    """Return pictures ``[rows, H, W, channels]`` of zeros. ``cameras``: name -> (height, width)."""
    return {
        name: torch.zeros(rows, *picture(name, size), dtype=getattr(torch, camera(name).dtype))
        for name, size in cameras.items()
    }


def noise(
    cameras: Mapping[str, tuple[int, int]], rows: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return pictures as ``blank`` with random values, on the CPU."""
    pictures = {}
    for name, zeros in blank(cameras, rows).items():
        above = 256 if zeros.dtype == torch.uint8 else FARTHEST_MM
        pictures[name] = torch.randint(
            0, above, zeros.shape, generator=generator, dtype=zeros.dtype
        )
    return pictures


def through_jpeg(images: Tensor) -> Tensor:
    """Pass uint8 ``[B, H, W, 3]`` through JPEG, on several cores: Pillow releases Python's lock."""
    pictures = images.cpu().numpy()
    if len(pictures) == 1:
        passed = [round_trip(pictures[0])]
    else:
        with ThreadPoolExecutor(min(len(pictures), own_cores(), CODERS)) as pool:
            passed = list(pool.map(round_trip, pictures))
    return torch.from_numpy(np.stack(passed)).to(images.device)


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize uint8 ``[B, H, W, 3]`` to uint8 ``[B, *size, 3]``; the aspect ratio may change.

    Bilinear with antialiasing, equal to Pillow's up to rounding. Distances, int16 ``[B, H, W, 1]``,
    are those of the nearest pixels: a mean of two surfaces is no surface.
    """
    if images.shape[1:3] == size:
        return images
    planes = images.permute(0, 3, 1, 2)
    if images.dtype != torch.uint8:
        nearest = interpolate(planes.float(), size, mode="nearest-exact")
        return nearest.to(images.dtype).permute(0, 2, 3, 1).contiguous()
    planes = (
        planes if planes.device.type == "cpu" else planes.float()
    )  # only the CPU interpolates uint8
    return (
        interpolate(planes, size, mode="bilinear", antialias=True)
        .round()
        .to(images.dtype)
        .permute(0, 2, 3, 1)
        .contiguous()
    )


def pillow_resized(images: Tensor, size: tuple[int, int], kernel: str) -> Tensor:
    """Resize uint8 ``[B, H, W, 3]`` to uint8 ``[B, *size, 3]``, as Pillow does, bit for bit.

    ``kernel``: bilinear or bicubic. On the CPU Pillow does it, which is fastest there. Elsewhere
    its fixed-point sums are products of matrices in float64, which holds them exactly. Source:
    Pillow's ``src/libImaging/Resample.c``.
    """
    if tuple(images.shape[1:3]) == size:
        return images
    if images.device.type == "cpu":
        from PIL import Image

        method = Image.Resampling[kernel.upper()]
        return torch.from_numpy(
            np.stack(
                [
                    np.asarray(Image.fromarray(image).resize(size[::-1], method))
                    for image in images.numpy()
                ]
            )
        )
    before = (images.shape[1], images.shape[2])
    return _two_passes(images, size, kernel, _columns_first(before, size, kernel))


def padded(images: Tensor, size: tuple[int, int], before: float = 0.5) -> Tensor:
    """Resize uint8 ``[B, H, W, 3]`` to ``[B, *size, 3]``, bilinear as Pillow, with black bars.

    ``before``: share of a bar at the top or the left. With a half, as openpi's ``resize_with_pad``.
    """
    if tuple(images.shape[1:3]) == size:
        return images
    (height, width), (top, left) = picture_within((images.shape[1], images.shape[2]), size, before)
    canvas = images.new_zeros(len(images), *size, 3)
    canvas[:, top : top + height, left : left + width] = pillow_resized(
        images, (height, width), "bilinear"
    )
    return canvas


def picture_within(
    shape: tuple[int, int], size: tuple[int, int], before: float
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return height and width of a picture of ``shape`` that fills ``size``, and top and left."""
    ratio = max(shape[1] / size[1], shape[0] / size[0])
    height, width = (int(side / ratio) for side in shape)
    return (height, width), (
        max(0, int((size[0] - height) * before)),
        max(0, int((size[1] - width) * before)),
    )


def _two_passes(images: Tensor, size: tuple[int, int], kernel: str, columns_first: bool) -> Tensor:
    planes = images.permute(0, 3, 1, 2).double()
    for axis in (3, 2) if columns_first else (2, 3):
        if planes.shape[axis] != size[axis - 2]:
            weights = _pillow_weights(planes.shape[axis], size[axis - 2], kernel, images.device)
            sums = planes @ weights.T if axis == 3 else weights @ planes
            planes = ((sums + 2 ** (_BITS - 1)) / 2**_BITS).floor().clamp(0, 255)
    return planes.byte().permute(0, 2, 3, 1).contiguous()


@functools.lru_cache(maxsize=64)
def _columns_first(before: tuple[int, int], after: tuple[int, int], kernel: str) -> bool:
    """Whether Pillow resamples columns before rows, which depends on its version and the sizes."""
    probe = torch.randint(
        256, (1, *before, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return torch.equal(
        _two_passes(probe, after, kernel, True), pillow_resized(probe, after, kernel)
    )


_BITS = 22
"""Fractional bits of Pillow's weights."""


@functools.lru_cache(maxsize=64)
def _pillow_weights(before: int, after: int, kernel: str, device: torch.device) -> Tensor:
    """Return Pillow's integer weights ``[after, before]``, float64 on ``device``."""
    support, weight = {"bilinear": (1.0, _bilinear), "bicubic": (2.0, _bicubic)}[kernel]
    scale = before / after
    spread = max(scale, 1.0)
    weights = torch.zeros(after, before, dtype=torch.float64)
    for row in range(after):
        centre = (row + 0.5) * scale
        first = max(int(centre - support * spread + 0.5), 0)
        last = min(int(centre + support * spread + 0.5), before)
        values = [weight((column - centre + 0.5) * (1 / spread)) for column in range(first, last)]
        total = sum(values)
        for column, value in enumerate(values, first):
            exact = value / total * 2**_BITS
            weights[row, column] = int(exact - 0.5 if exact < 0 else exact + 0.5)
    return weights.to(device)


def _bilinear(x: float) -> float:
    return max(1.0 - abs(x), 0.0)


def _bicubic(x: float) -> float:
    x = abs(x)
    a = -0.5
    if x < 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2 else 0.0

"""Procedural pictures of PutOnPlate25: table tops, and what is blended over an image.

Everything is a function of an index alone, so it is the same on every machine and in every process.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.uint8]

SIZE = 128
"""Pixels along a side of a table's texture."""
SEEN_TABLES, TABLES = 16, 21
"""Numbers of table tops in training and altogether, as in the papers."""
OVERLAYS = 16
COARSE = 32
"""Cells along a side of an overlay."""

PALETTE = (
    ((44, 44, 50), (54, 54, 62)),
    ((120, 84, 52), (98, 66, 40)),
    ((78, 92, 76), (62, 76, 62)),
    ((148, 136, 116), (128, 116, 98)),
    ((66, 76, 100), (52, 60, 84)),
    ((106, 62, 56), (86, 48, 44)),
    ((90, 90, 92), (70, 70, 72)),
)
"""Muted pairs of colours, so that objects stand out."""


def _cells() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    y, x = np.mgrid[0:SIZE, 0:SIZE] / SIZE
    return x, y


def _stripes() -> NDArray[np.float64]:
    return np.floor(_cells()[0] * 24) % 2


def _checks() -> NDArray[np.float64]:
    x, y = _cells()
    return (np.floor(x * 12) + np.floor(y * 12)) % 2


def _wood() -> NDArray[np.float64]:
    x, y = _cells()
    return 0.5 + 0.5 * np.sin(2 * np.pi * (9 * x + 0.6 * np.sin(2 * np.pi * y)))


def _dots() -> NDArray[np.float64]:
    x, y = _cells()
    return (np.hypot(x * 10 % 1 - 0.5, y * 10 % 1 - 0.5) < 0.3).astype(float)


def _bricks() -> NDArray[np.float64]:
    x, y = _cells()
    row = np.floor(y * 10)
    return ((y * 10 % 1 < 0.18) | ((x * 5 + 0.5 * (row % 2)) % 1 < 0.09)).astype(float)


def _plain() -> NDArray[np.float64]:
    return np.zeros((SIZE, SIZE))


SEEN_PATTERNS = (_plain, _stripes, _wood, _bricks)
UNSEEN_PATTERNS = (_checks, _dots)


@cache
def table_texture(table: int) -> Picture:
    """Texture uint8 ``[SIZE, SIZE, 3]`` of a table top.

    Tables from SEEN_TABLES on have other patterns and colours.
    """
    if table < SEEN_TABLES:
        pattern = SEEN_PATTERNS[table % len(SEEN_PATTERNS)]
        (light, dark) = PALETTE[table // len(SEEN_PATTERNS)]
    else:
        unseen = table - SEEN_TABLES
        pattern = UNSEEN_PATTERNS[unseen % len(UNSEEN_PATTERNS)]
        (light, dark) = PALETTE[4 + unseen // len(UNSEEN_PATTERNS)]
    mix = pattern()[..., None]
    return np.round(np.array(light) * (1 - mix) + np.array(dark) * mix).astype(np.uint8)


@cache
def overlay(index: int, height: int, width: int) -> NDArray[np.float32]:
    """Coloured cells float32 ``[2 * height, 2 * width, 3]``, 0 to 255.

    An image shows a part of them. Odd overlays have cells that are stretched along a line.
    """
    rng = np.random.RandomState(1000 + index)
    shape = (
        (COARSE // 8, COARSE)
        if index % 4 == 1
        else (COARSE, COARSE // 8)
        if index % 4 == 3
        else (COARSE, COARSE)
    )
    cells = rng.randint(0, 256, (*shape, 3)).astype(np.float32)
    rows = np.arange(2 * height) * shape[0] // (2 * height)
    columns = np.arange(2 * width) * shape[1] // (2 * width)
    return np.ascontiguousarray(cells[rows][:, columns])

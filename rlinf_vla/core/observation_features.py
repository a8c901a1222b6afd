"""What an observation consists of: dtype, shape and meaning of each feature. Needs no PyTorch.

The name of a camera says what it shows: ``base_depth`` shows distances, ``base`` colours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rlinf_vla.config.errors import UserError


class Feature(NamedTuple):
    dtype: str
    shape: tuple[str | int, ...]
    """Of one environment; letters stand for sizes that its spec has."""
    meaning: str


FEATURES = {
    "colour": Feature("uint8", ("H", "W", 3), "RGB, upright"),
    "depth": Feature("int16", ("H", "W", 1), "mm along the camera's axis; 0: nothing measured"),
    "state": Feature("float32", ("S",), "proprioception in SI units"),
}
DEPTH = "_depth"
"""Ending of the name of a camera that shows distances."""


def camera(name: str) -> Feature:
    """Return what the camera of this name shows."""
    return FEATURES["depth" if name.endswith(DEPTH) else "colour"]


def picture(name: str, size: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the shape of a camera's picture, of ``size`` (height, width)."""
    height, width = size
    return height, width, int(camera(name).shape[-1])


def require_colours(cameras: Iterable[str], what: str) -> None:
    """Raise UserError if a camera shows anything else, for ``what``, which has only colours."""
    for name in cameras:
        if camera(name) is not FEATURES["colour"]:
            raise UserError(
                f"image {name!r} shows distances, {what} has only colours: leave this camera out"
            )

"""Image files in messages, read safely from anybody. Needs numpy, and Pillow where used."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Channels of an image -> its name in Pillow."""


class MessageError(ValueError):
    """A message that is malformed or exceeds a limit, in one line."""


def read_image(
    data: bytes, most: int, formats: tuple[str, ...] = ("PNG", "JPEG"), channels: int = 3
) -> NDArray[np.uint8]:
    """Return the image that a file holds, read-only uint8 ``[H, W, channels]``.

    Its size is read first. Raises MessageError if it has more than ``most`` bytes, or is damaged.
    """
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data), formats=formats)  # decodes nothing yet
        width, height = image.size
        pixels = (
            np.array(image.convert(MODES[channels])) if width * height * channels <= most else None
        )
    except Exception:  # Pillow raises OSError, SyntaxError, ValueError, struct.error ...
        raise MessageError("an image whose data is damaged") from None
    if pixels is None:
        raise MessageError(f"an image of {height}x{width} pixels has more than {most} bytes")
    pixels = pixels.reshape(height, width, channels)
    pixels.flags.writeable = False
    return pixels


def write_png(image: NDArray[np.uint8]) -> bytes:
    """Return the file of uint8 ``[H, W, 1, 3 or 4]``."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(file, "PNG")
    return file.getvalue()

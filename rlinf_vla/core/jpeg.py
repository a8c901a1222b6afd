"""The JPEG round trip that images of RLDS data have had. Needs numpy and Pillow only."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray

QUALITY, CHROMA_420 = 95, 2  # TensorFlow's defaults


def round_trip(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Encode uint8 ``[H, W, 3]`` as JPEG, and return the decoded image."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=QUALITY, subsampling=CHROMA_420)
    return np.asarray(Image.open(file))

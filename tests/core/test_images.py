"""Downscaled images, compared with Pillow's."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from rlinf_vla.core.images import resized


def test_resizing_is_pillows_bilinear() -> None:
    images = torch.randint(256, (2, 48, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = resized(images, (16, 20))
    wanted = [np.asarray(Image.fromarray(image.numpy()).resize((20, 16), Image.Resampling.BILINEAR)) for image in images]
    assert found.dtype == torch.uint8 and found.shape == (2, 16, 20, 3) and found.is_contiguous()
    assert np.abs(found.numpy().astype(int) - np.stack(wanted).astype(int)).max() <= 1


def test_the_same_size_is_the_same_image() -> None:
    images = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
    assert resized(images, (8, 8)) is images

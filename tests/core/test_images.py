"""Downscaled images, compared with Pillow's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from rlinf_vla.core.images import pillow_resized, resized, through_jpeg
from rlinf_vla.core.jpeg import round_trip
from rlinf_vla.testing.simulated_gpu import GPU, GpuTensor, simulated_gpu


def test_resizing_is_pillows_bilinear() -> None:
    images = torch.randint(
        256, (2, 48, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    found = resized(images, (16, 20))
    wanted = [
        np.asarray(Image.fromarray(image.numpy()).resize((20, 16), Image.Resampling.BILINEAR))
        for image in images
    ]
    assert found.dtype == torch.uint8 and found.shape == (2, 16, 20, 3) and found.is_contiguous()
    assert np.abs(found.numpy().astype(int) - np.stack(wanted).astype(int)).max() <= 1


@pytest.mark.parametrize("count", [1, 5])
def test_a_batch_passes_through_jpeg_as_its_images_do(count: int) -> None:
    images = torch.randint(256, (count, 20, 24, 3), dtype=torch.uint8)
    wanted = [round_trip(image) for image in images.numpy()]
    assert torch.equal(through_jpeg(images), torch.from_numpy(np.stack(wanted)))


def test_the_same_size_is_the_same_image() -> None:
    images = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
    assert resized(images, (8, 8)) is images


SIDE = st.integers(1, 70)


@given(
    before=st.tuples(SIDE, SIDE),
    after=st.tuples(SIDE, SIDE),
    kernel=st.sampled_from(["bilinear", "bicubic"]),
    seed=st.integers(0, 9),
)
@example(before=(256, 256), after=(224, 224), kernel="bicubic", seed=0)
@example(before=(480, 640), after=(168, 224), kernel="bilinear", seed=0)
@example(before=(8, 8), after=(8, 5), kernel="bicubic", seed=0)
def test_a_gpu_resizes_with_the_bits_of_pillow(
    before: tuple[int, int], after: tuple[int, int], kernel: str, seed: int
) -> None:
    images = torch.randint(
        256, (2, *before, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    images[1] = (images[1] > 127) * 255  # overshoot of bicubic
    wanted = pillow_resized(images, after, kernel)
    with simulated_gpu():
        found = pillow_resized(images.to(GPU), after, kernel)
        assert isinstance(found, GpuTensor) or before == after
        assert found.shape == (2, *after, 3) and torch.equal(found.cpu(), wanted)

"""Random shifts of images: distance, and independence of the images."""

from __future__ import annotations

import torch

from rlinf_vla.algorithms.augmentation import shift_images

PAD = 2


def moved(count: int, pad: int = PAD) -> list[tuple[int, int]]:
    """By how many pixels each of ``count`` equal images was moved down and right: a ramp encodes the origin of each pixel."""
    rows, columns = torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij")
    image = torch.stack([rows, columns, torch.zeros_like(rows)], dim=-1).to(torch.uint8)
    inputs = {"image.base": image.expand(count, -1, -1, -1).clone(), "state": torch.arange(count)}
    found = shift_images(inputs, pad, torch.Generator().manual_seed(0))
    assert torch.equal(found["state"], inputs["state"]) and torch.equal(
        inputs["image.base"][0], image
    ), "the original is unchanged"
    middle = found["image.base"][:, 6, 6].long()
    return [(int(row) - 6, int(column) - 6) for row, column, _ in middle]


def test_images_are_shifted_independently_and_every_shift_occurs() -> None:
    found = moved(600)
    wanted = {(down, right) for down in range(-PAD, PAD + 1) for right in range(-PAD, PAD + 1)}
    assert set(found) == wanted
    counts = torch.tensor([found.count(each) for each in wanted]).double()
    assert float(((counts - 24) ** 2 / 24).sum()) < 51, "chi-square of 24 degrees, p = 0.001"


def test_a_shift_of_zero_changes_nothing() -> None:
    assert set(moved(20, 0)) == {(0, 0)}

from __future__ import annotations

import pytest
import torch

from rlinf_vla.core.images import blank, noise, resized
from rlinf_vla.core.observation_features import FEATURES, camera, picture

CAMERAS = {"base": (4, 6), "base_depth": (4, 6)}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("base", "colour"), ("base_depth", "depth"), ("depth", "colour"), ("depths", "colour")],
)
def test_the_ending_of_a_cameras_name_says_what_it_shows(name: str, kind: str) -> None:
    assert camera(name) is FEATURES[kind]
    assert picture(name, (4, 6)) == (4, 6, {"colour": 3, "depth": 1}[kind])


def test_pictures_have_the_dtype_and_shape_of_their_camera() -> None:
    for pictures in (blank(CAMERAS, 2), noise(CAMERAS, 2, torch.Generator().manual_seed(0))):
        assert {name: (each.dtype, each.shape) for name, each in pictures.items()} == {
            "base": (torch.uint8, (2, 4, 6, 3)),
            "base_depth": (torch.int16, (2, 4, 6, 1)),
        }
    assert not any(each.any() for each in blank(CAMERAS, 2).values())
    assert all(each.any() for each in noise(CAMERAS, 2, torch.Generator()).values())


def test_distances_are_not_averaged_over_surfaces() -> None:
    near_and_far = torch.tensor([500, 500, 3000, 3000], dtype=torch.int16).expand(4, 4)
    smaller = resized(near_and_far[None, :, :, None], (2, 2))
    assert smaller.dtype == torch.int16 and smaller[0, :, :, 0].tolist() == [[500, 3000]] * 2

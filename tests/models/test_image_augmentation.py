"""Augmentation of images, against loops in float64 over pixels and Python's own colour spaces.

The loops write out what openpi does with augmax 0.3.4 and 0.4.1, and OpenVLA's trainers with dlimp
and TensorFlow: ``crop_and_resize``, ``adjust_contrast``, ``adjust_saturation`` and ``adjust_hue``.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlinf_vla.algorithms.base import DemonstrationConfig, OptimizerConfig
from rlinf_vla.algorithms.sft import SFT, Demonstrations, SFTConfig
from rlinf_vla.core.protocols import Policy
from rlinf_vla.models.augmentation import hsv, rgb
from rlinf_vla.models.openvla.augmentation import prismatic_augmented
from rlinf_vla.models.openvla.processor import center_crop
from rlinf_vla.models.pi0.augmentation import openpi_augmented
from rlinf_vla.rollout.demonstrations import collect_demonstrations
from rlinf_vla.rollout.noise import augmentation_noise, imitation_noise
from rlinf_vla.runtime.supervised import supervised_step
from rlinf_vla.testing.policy_calls import observations
from rlinf_vla.testing.toy_env import groups
from rlinf_vla.training.trainer import Trainer
from tests.models.test_pi0 import small as small_pi0
from tests.models.tiny_openvla import smaller_directory, tiny
from tests.training.processes import on_ranks

SIZE = (20, 24)
Pixels = np.ndarray[Any, np.dtype[np.float64]]


def pictures(count: int, size: tuple[int, int] = SIZE, seed: int = 0) -> Tensor:
    """Noise, and flat areas of black, white, grey and pure colours."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, *size), dtype=torch.uint8, generator=generator)
    flat = torch.tensor([[0, 0, 0], [255, 255, 255], [128, 128, 128], [255, 0, 0], [0, 255, 255]])
    images[:, :, 2:7, 3:9] = flat.to(torch.uint8).T[None, :, :, None]
    return images


def noise(draws: Tensor) -> Any:
    return augmentation_noise(5, draws)


def sampled(image: Pixels, row: float, column: float) -> Pixels:
    """The pixel ``[3]`` of ``[H, W, 3]`` there, with zeros around the image."""
    total = np.zeros(3)
    for i in (math.floor(row), math.floor(row) + 1):
        for j in (math.floor(column), math.floor(column) + 1):
            if 0 <= i < image.shape[0] and 0 <= j < image.shape[1]:
                total += (1 - abs(row - i)) * (1 - abs(column - j)) * image[i, j]
    return total


def openpi(image: Pixels, moves: bool, drawn: list[float], jitter: list[float]) -> Pixels:
    """``augmax.Chain(RandomCrop, Resize, Rotate, ColorJitter)``: matrices of (y, x, 1)."""
    height, width, _ = image.shape
    if moves:
        crop = [int(side * 0.95) for side in (height, width)]
        limit = [(side - cut) / 2 for side, cut in zip((height, width), crop, strict=True)]
        centre = [(2 * u - 1) * most for u, most in zip(drawn, limit, strict=False)]
        theta = math.radians(-5 + 10 * drawn[2])
        rotate = [
            [math.cos(theta), math.sin(theta), 0],
            [-math.sin(theta), math.cos(theta), 0],
            [0, 0, 1],
        ]
        resize = np.diag([crop[0] / height, crop[1] / width, 1])
        moved = np.array([[1, 0, centre[0]], [0, 1, centre[1]], [0, 0, 1]])
        matrix = moved @ resize @ np.array(rotate)
        found = np.zeros_like(image)
        middle = np.array([height / 2 - 0.5, width / 2 - 0.5])
        for i in range(height):
            for j in range(width):
                place = matrix @ np.array([i - middle[0], j - middle[1], 1])
                found[i, j] = sampled(image, *(place[:2] + middle))
        image = found
    if jitter[0] >= 0.5:
        return image
    brightness, contrast, hue = (
        most * (2 * u - 1) for most, u in zip((0.3, 0.4, 0.1), jitter[1:], strict=True)
    )
    slant = math.tan((contrast + 1) * math.pi / 4)
    knee = (slant - slant**2) / (2 * (1 - slant**2))
    found = np.zeros_like(image)
    for i in range(height):
        for j in range(width):
            h, s, v = colorsys.rgb_to_hsv(*image[i, j])
            v = v * (1 + brightness) if brightness < 0 else v * (1 - brightness) + brightness
            if v < knee:
                v = v / slant
            elif v > 1 - knee:
                v = v / slant + 1 - 1 / slant
            else:
                v = slant * (v - 0.5) + 0.5
            found[i, j] = colorsys.hsv_to_rgb((h + hue) % 1, s, v)
    return found


def prismatic(image: Pixels, drawn: list[float]) -> Pixels:
    """dlimp's ``augment_image`` with OpenVLA's ``augment_order``."""
    height, width, _ = image.shape
    side = math.sqrt(0.9)
    start = drawn[0] * (1 - side)
    cropped = np.zeros_like(image)
    for i in range(height):
        for j in range(width):
            row, column = (
                start * (pixels - 1) + k * (side * (pixels - 1)) / (pixels - 1)
                for k, pixels in ((i, height), (j, width))
            )
            cropped[i, j] = sampled(image, row, column)
    image = np.clip(cropped, 0, 1)
    image = np.clip(image + (-0.2 + 0.4 * drawn[1]), 0, 1)
    mean = image.mean(axis=(0, 1))
    image = np.clip((image - mean) * (0.8 + 0.4 * drawn[2]) + mean, 0, 1)
    found = np.zeros_like(image)
    for i in range(height):
        for j in range(width):
            h, s, v = colorsys.rgb_to_hsv(*image[i, j])
            saturated = colorsys.hsv_to_rgb(h, min(1, s * (0.8 + 0.4 * drawn[3])), v)
            h, s, v = colorsys.rgb_to_hsv(*np.clip(saturated, 0, 1))
            found[i, j] = colorsys.hsv_to_rgb((h - 0.05 + 0.1 * drawn[4]) % 1, s, v)
    return np.floor(np.clip(found, 0, 1) * 255.5).clip(max=255)


@pytest.mark.parametrize("moves", [True, False])
def test_openpi_s_augmentation_is_that_of_the_loops(moves: bool) -> None:
    images = pictures(8)
    draws = torch.arange(8)
    found = openpi_augmented(images, noise(draws), moves).double() / 255
    source = noise(draws)
    drawn = source.uniform(3) if moves else torch.zeros(8, 3)
    jitter = source.uniform(4)
    jittered = (jitter[:, 0] < 0.5).tolist()
    assert any(jittered) and not all(jittered)
    for row in range(8):
        image = images[row].permute(1, 2, 0).double().numpy() / 255
        expected = openpi(image, moves, drawn[row].tolist(), jitter[row].tolist())
        difference = np.abs(found[row].permute(1, 2, 0).numpy() - expected)
        assert difference.max() < 2e-4  # where a hue is of a small difference of colours
        assert np.median(difference) < 1e-6
        if not moves and not jittered[row]:
            assert torch.equal((found[row] * 255).round().byte(), images[row])


def test_openvla_s_augmentation_is_that_of_the_loops() -> None:
    images = pictures(8)
    draws = torch.arange(8)
    found = prismatic_augmented(images, noise(draws))
    drawn = noise(draws).uniform(5)
    assert found.dtype == torch.uint8
    for row in range(8):
        image = images[row].permute(1, 2, 0).double().numpy() / 255
        expected = prismatic(image, drawn[row].tolist())
        difference = np.abs(found[row].permute(1, 2, 0).double().numpy() - expected)
        assert difference.max() <= 1 and (difference > 0).mean() < 0.005


def test_colours_are_those_of_python() -> None:
    pixels = pictures(1)[0].double().div(255)[None]
    found = [part.flatten().tolist() for part in hsv(pixels)]
    expected = [colorsys.rgb_to_hsv(*each.tolist()) for each in pixels[0].flatten(1).T]
    for part, column in zip(found, zip(*expected, strict=True), strict=True):
        assert part == pytest.approx(column, abs=1e-12) or [
            each % 1 for each in part
        ] == pytest.approx(column, abs=1e-12)
    torch.testing.assert_close(rgb(*hsv(pixels)), pixels)


def test_openvla_s_ranges_are_filled() -> None:
    """A grey image shows the brightness alone, and a gradient where the crop is."""
    grey = torch.full((2000, 3, 4, 4), 128, dtype=torch.uint8)
    levels = prismatic_augmented(grey, noise(torch.arange(2000)))[:, 0, 0, 0].float() / 255
    assert 0.30 <= levels.min() < 0.305 and 0.695 < levels.max() <= 0.703
    assert levels.mean() == pytest.approx(0.5, abs=0.01)
    drawn = noise(torch.arange(2000)).uniform(5)
    assert drawn.min() < 0.002 and drawn.max() > 0.998
    assert np.abs(np.corrcoef(drawn.T.numpy()) - np.eye(5)).max() < 0.1


def test_half_of_openpi_s_images_have_other_colours_and_all_have_moved() -> None:
    images = pictures(400, (16, 16))
    still = openpi_augmented(images, noise(torch.arange(400)), moves=False)
    same = [torch.equal(a.round().byte(), b) for a, b in zip(still, images, strict=True)]
    assert sum(same) == pytest.approx(200, abs=40)
    moved = openpi_augmented(images, noise(torch.arange(400)), moves=True)
    assert not any(torch.equal(a.round().byte(), b) for a, b in zip(moved, images, strict=True))
    assert still.min() >= 0 and still.max() <= 255.01


@pytest.mark.parametrize("augmented", [partial(openpi_augmented, moves=True), prismatic_augmented])
def test_an_image_does_not_depend_on_the_others_of_its_micro_batch(
    augmented: Callable[..., Tensor],
) -> None:
    images = pictures(11, (32, 48))
    draws = torch.arange(40, 51)
    whole = augmented(images, noise(draws))
    for rows in ([3], [10, 0], list(range(4, 11))):
        assert torch.equal(augmented(images[rows], noise(draws[rows])), whole[rows])
    assert not torch.equal(augmented(images, noise(draws + 1)), whole)


@pytest.fixture(scope="module")
def openvla(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return tiny(directory=smaller_directory(tmp_path_factory.mktemp("openvla")), center_crop=True)


@pytest.fixture(scope="module")
def pi0(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return small_pi0(tmp_path_factory.mktemp("pi0"), images=["base", "wrist"])


def test_openvla_s_random_crop_takes_the_place_of_the_centre_crop(openvla: Policy) -> None:
    obs = observations(openvla, 3)
    acts, whole = openvla.prepare(obs), openvla.prepare_to_augment(obs)
    assert openvla.augmentation_unsupported is None
    assert list(acts) == list(whole)
    seen = openvla.augment(whole, noise(torch.arange(3)))
    images = [name for name in acts if name.startswith("image.")]
    for name, value in acts.items():
        if name in images:
            assert torch.equal(value, center_crop(whole[name]))
            assert not torch.equal(value, whole[name])
            assert seen[name].shape == value.shape and seen[name].dtype == torch.uint8
        else:
            assert torch.equal(value, whole[name]) and torch.equal(value, seen[name])
    assert torch.equal(
        seen[images[0]], prismatic_augmented(whole[images[0]], noise(torch.arange(3)))
    )


def test_pi0_s_wrist_cameras_do_not_move(pi0: Policy) -> None:
    assert any("wrist" in name for name in pi0.spec.images)
    obs = observations(pi0, 3)
    inputs = pi0.prepare_to_augment(obs)
    assert all(torch.equal(value, inputs[name]) for name, value in pi0.prepare(obs).items())
    seen = pi0.augment(inputs, noise(torch.arange(3)))
    source = noise(torch.arange(3))
    for name in pi0.spec.images:
        key = f"image.{name}"
        expected = openpi_augmented(inputs[key], source, moves="wrist" not in name)
        assert torch.equal(seen[key], expected)
    actions = torch.zeros(3, pi0.horizon, pi0.spec.action_dim)
    losses = [
        pi0.supervised_loss(each, actions, imitation_noise(0, torch.arange(3)))
        for each in (inputs, seen)
    ]
    assert losses[1].isfinite().all() and not torch.equal(*losses)


class Sees(nn.Module):
    """Keeps the images that it has to imitate, by the number that each shows in its last pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: dict[int, Tensor] = {}

    def augment(self, inputs: dict[str, Tensor], noise: Any) -> dict[str, Tensor]:
        return inputs | {"image": prismatic_augmented(inputs["image"], noise)}

    def supervised_loss(self, inputs: dict[str, Tensor], actions: Tensor, noise: Any) -> Tensor:
        for number, image in zip(inputs["number"].tolist(), inputs["image"], strict=True):
            self.seen[number] = image.clone()
        return self.weight * actions.flatten(1).mean(1)


def imitated(micro: int) -> dict[int, Tensor]:
    policy = Sees()
    trainer = Trainer(policy, OptimizerConfig(1e-3, 1e-3, 1.0), micro)
    for step in range(3):
        numbers = 7 * step + torch.arange(7)
        inputs = {"image": pictures(7, seed=step), "number": numbers}
        shown = Demonstrations(inputs, torch.ones(7, 1, 1), numbers)
        supervised_step(trainer, SFT(SFTConfig(augmentation="official")), 9, shown, 1.0)
    return policy.seen


def test_ranks_and_micro_batches_see_the_same_images(tmp_path: Path) -> None:
    alone = imitated(100)
    assert sorted(alone) == list(range(21))
    ranks = on_ranks(lambda rank: imitated(2), tmp_path)
    assert set(ranks[0]) | set(ranks[1]) == set(alone)
    for of_rank in (*ranks, imitated(3)):
        assert all(torch.equal(image, alone[number]) for number, image in of_rank.items())


def test_demonstrations_to_augment_are_kept_uncropped(openvla: Policy) -> None:
    config = DemonstrationConfig(episodes=2, noise=[0.0])
    plain, whole = (
        collect_demonstrations(openvla, groups(2, 1), config, 0, augmented=augmented)[0]
        for augmented in (False, True)
    )
    for name in plain.inputs:
        if name.startswith("image."):
            assert torch.equal(plain.inputs[name], center_crop(whole.inputs[name]))

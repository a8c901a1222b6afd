"""Images, action tokens, normalisation and prompts against the official preprocessing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlinf_vla.core.images import through_jpeg
from rlinf_vla.models.normalizer import Normalizer, absolute, relative
from rlinf_vla.models.openvla import processor as openvla
from rlinf_vla.models.openvla.actions import ActionTokenizer
from rlinf_vla.models.pi0.processor import PromptEncoder, delta_dimensions, resize_with_pad

from .fixtures import Arrays, Fixture, difference


@pytest.fixture(scope="module")
def prismatic() -> Fixture:
    return Fixture("openvla_preproc")


@pytest.fixture(scope="module")
def openpi() -> Fixture:
    return Fixture("openpi_preproc")


def test_openvla_images(prismatic: Fixture) -> None:
    compared = 0
    for name in prismatic.expected:
        strategy, _, rest = name.partition("_")
        if strategy not in openvla.STRATEGIES:
            continue
        size, _, image = rest.partition("_")
        pixels = openvla.PixelNormalizer()(
            openvla.resize(prismatic.inputs[image][None], (int(size), int(size)), strategy)
        )[0]
        every = 5 if int(size) == 224 else 1
        assert difference(pixels[:, ::every, ::every], prismatic.expected[name]) <= 1e-6, name
        compared += 1
    assert compared == 18


def test_the_images_of_the_official_evaluation(prismatic: Fixture) -> None:
    """TensorFlow's. Lanczos is exact; the crop rounds a few pixels in 100 000 the other way; PIL and TensorFlow decode JPEG differently."""
    expected = Arrays(prismatic.path / "expected_tf.npz")
    for name in expected:
        kind = name.rsplit("_", 2)[0]
        source = prismatic.inputs[name.removeprefix(f"{kind}_")][None]
        if kind == "center_crop":
            found = openvla.center_crop(source.permute(0, 3, 1, 2))
        elif kind == "resized":
            found = openvla.lanczos(through_jpeg(source), (224, 224))[..., ::3, ::3]
        else:
            found = openvla.lanczos(source, (224, 224))[..., ::3, ::3]
        off = (found[0].permute(1, 2, 0).double() - expected[name].double()).abs()
        worst, mean = {"center_crop": (1, 1e-4), "resized": (8, 1.7), "resized_nojpeg": (0, 0)}[
            kind
        ]
        assert off.max() <= worst and off.mean() <= mean, (name, off.max(), off.mean())
    assert expected.keys() == expected.used


def test_openvla_action_tokens(prismatic: Fixture) -> None:
    inputs, expected = prismatic.inputs, prismatic.expected
    tokenizer = ActionTokenizer(32000, 256, {"q01": [-1.0], "q99": [1.0]})
    assert (
        tokenizer.encode(inputs["actions"][:, None])[:, 0].tolist()
        == expected["action_token_ids"].tolist()
    )
    assert (
        difference(
            tokenizer.decode(inputs["token_ids"][:, None])[:, 0], expected["decoded_actions"]
        )
        <= 1e-7
    )
    assert difference(tokenizer.centres, expected["bin_centers"]) <= 1e-7


@pytest.mark.parametrize("quantiles", [False, True])
def test_openpi_normalisation(openpi: Fixture, quantiles: bool) -> None:
    inputs = openpi.inputs
    expected = openpi.expected
    kind = f"q{int(quantiles)}"
    statistics = openpi.json("norm_stats.json")["norm_stats"]
    state, actions = (
        Normalizer(statistics[name], "QUANTILES" if quantiles else "MEAN_STD")
        for name in ("state", "actions")
    )
    for name, normalizer in (("state", state), ("actions", actions)):
        normalised = normalizer(inputs[name])
        assert difference(normalised, expected[f"norm_{name}_{kind}"]) <= 1e-12
        padded = expected[f"padded_{name}_{kind}"]
        assert (
            difference(
                torch.nn.functional.pad(normalised, (0, padded.shape[-1] - normalised.shape[-1])),
                padded,
            )
            <= 1e-12
        )
    dims = expected[f"libero_actions_{kind}"].shape[-1]
    found = actions.inverse(inputs["model_actions"][..., :dims])
    assert difference(found, expected[f"libero_actions_{kind}"]) <= 1e-12
    assert difference(found, expected[f"unnorm_actions_{kind}"][..., :dims]) <= 1e-12


def test_openpi_images(openpi: Fixture) -> None:
    for name, image in openpi.inputs.items():
        if not name.startswith("img_"):
            continue
        whole = image.repeat_interleave(8, dim=0).repeat_interleave(8, dim=1)
        found = resize_with_pad(whole[None], (224, 224))[0].permute(1, 2, 0)[::3, ::3]
        height, width = whole.shape[:2]
        assert found.tolist() == openpi.expected[f"client_resize_pad_{height}x{width}"].tolist()


def test_openpi_delta_actions(openpi: Fixture) -> None:
    inputs, expected = openpi.inputs, openpi.expected
    state, actions = inputs["state"], inputs["actions"]
    dimensions = delta_dimensions([6, -1], actions.shape[-1], len(state))
    assert dimensions == expected["delta_mask"].nonzero()[:, 0].tolist()
    assert difference(relative(actions, state, dimensions), expected["delta_actions"]) <= 1e-12
    assert difference(absolute(actions, state, dimensions), expected["absolute_actions"]) <= 1e-12


class Recording:
    """A tokenizer that records its calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        self.asked.append(text)
        return type("Encoding", (), {"ids": [7]})()


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_openpi_prompts(openpi: Fixture, kind: str) -> None:
    expected = openpi.json("text.json")[kind]
    tokenizer = Recording()
    encoder = PromptEncoder(tokenizer, expected["len"], bos_id=2, with_state=kind == "pi05")  # type: ignore[arg-type]
    ids, mask = encoder(["Pick_up the red\nblock "], openpi.inputs["pi05_state"][None])
    assert tokenizer.asked == [text for text, _ in expected["encode_calls"]]
    assert [add_bos for _, add_bos in expected["encode_calls"]] == [
        i == 0 for i in range(len(tokenizer.asked))
    ]
    assert ids.shape == mask.shape == (1, expected["len"]) and ids[0, 0] == 2
    assert set(ids[0, ~mask[0]].tolist()) == {expected["pad_id"]}


def test_everything_was_compared(openpi: Fixture, prismatic: Fixture) -> None:
    assert prismatic.expected.keys() == prismatic.expected.used
    left = openpi.expected.keys() - openpi.expected.used
    # resizing on the device, of which openpi has two that differ by up to 0.43: its client resizes before, and so do we
    assert all(name.startswith(("torch_resize_pad", "jax_resize_pad")) for name in left), left

"""Known mistakes that cost success rate (measured by vla-eval, their docs/reproductions/common-pitfalls.md), each made on purpose.

Every test compares with the official result and checks that the mistake differs much from it. Mistakes of environments are tested in
tests/envs: the antipodal flip of quaternions on their way to axis-angle, the source of the state (what is measured, in
which frame), images rotated by 180 degrees, the control rate, the episode limit, when an episode counts as a success, rot6d layouts (no
policy here reads or writes them). The policy determines the order of the state, its statistics, and where they apply.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.images import through_jpeg
from rlinf_vla.models.normalizer import Normalizer, absolute, relative
from rlinf_vla.models.openvla.actions import ActionTokenizer, ProprioNormalizer
from rlinf_vla.models.openvla.checkpoint import read_conventions, read_statistics
from rlinf_vla.models.openvla.oft import OpenVLAOFTPolicy, slot_states
from rlinf_vla.models.openvla.options import OpenVLAOFTOptions, OpenVLAOptions
from rlinf_vla.models.openvla.policy import OpenVLAPolicy
from rlinf_vla.models.openvla.prismatic import PrismaticVLA
from rlinf_vla.models.openvla.processor import center_crop, lanczos, resize
from rlinf_vla.models.pi0.policy import Pi0Options, Pi0Policy
from rlinf_vla.models.pi0.processor import delta_dimensions
from rlinf_vla.testing.policy_calls import act, noise, observations
from tests.models.test_pi0 import small as small_pi0
from tests.models.tiny_openvla import smaller_config, smaller_directory, tiny
from tests.parity.fixtures import Arrays, Fixture, difference, prompts

SIZE = (224, 224)


@pytest.fixture(scope="module")
def prismatic() -> Fixture:
    return Fixture("openvla_preproc")


@pytest.fixture(scope="module")
def evaluated(prismatic: Fixture) -> Arrays:
    """Images of the official evaluation, computed by TensorFlow."""
    return Arrays(prismatic.path / "expected_tf.npz")


def images(array: Tensor) -> Tensor:
    return array[None].permute(0, 3, 1, 2)


def mean_difference(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).abs().mean())


def test_no_centre_crop(prismatic: Fixture, evaluated: Arrays) -> None:
    image = images(prismatic.inputs["c_224x224"])
    expected = images(evaluated["center_crop_c_224x224"])
    assert mean_difference(center_crop(image), expected) <= 1e-4
    assert mean_difference(image, expected) > 1


def test_a_crop_of_nine_tenths_of_each_side(prismatic: Fixture, evaluated: Arrays) -> None:
    """The official crop keeps nine tenths of the area."""
    image = images(prismatic.inputs["c_224x224"])
    expected = images(evaluated["center_crop_c_224x224"])
    inner = image[..., 11:213, 11:213].permute(0, 2, 3, 1)
    assert mean_difference(resize(inner, SIZE), expected) > 1


@pytest.mark.parametrize("name", ["a_256x256", "b_128x96"])
def test_another_filter_than_lanczos(prismatic: Fixture, evaluated: Arrays, name: str) -> None:
    image = prismatic.inputs[name]
    expected = images(evaluated[f"resized_nojpeg_{name}"])
    assert torch.equal(lanczos(image[None], SIZE)[..., ::3, ::3], expected)
    assert mean_difference(resize(image[None], SIZE)[..., ::3, ::3], expected) > 0.3


def test_no_jpeg_round_trip(prismatic: Fixture, evaluated: Arrays) -> None:
    image = prismatic.inputs["a_256x256"]
    expected = images(evaluated["resized_a_256x256"])
    assert mean_difference(lanczos(through_jpeg(image[None]), SIZE)[..., ::3, ::3], expected) < 2
    assert mean_difference(lanczos(image[None], SIZE)[..., ::3, ::3], expected) > 3


def test_an_official_fine_tune_is_cropped_by_default(tmp_path: Path) -> None:
    base = {"norm_stats": {"bridge_orig": {}}}
    assert read_conventions(tmp_path, base, OpenVLAOptions()) == {
        "center_crop": False,
        "resize": "processor",
        "gripper": "raw",
        "bounds": "q99",
    }
    (tmp_path / "dataset_statistics.json").write_text("{}")
    assert read_conventions(tmp_path, base, OpenVLAOptions()) == {
        "center_crop": True,
        "resize": "rlds",
        "gripper": "raw",
        "bounds": "q99",
    }
    assert not read_conventions(tmp_path, base, OpenVLAOptions(center_crop=False))["center_crop"]
    assert not read_conventions(tmp_path, base | {"center_crop": False}, OpenVLAOptions())[
        "center_crop"
    ]
    assert not read_conventions(tmp_path, {}, OpenVLAOptions())["center_crop"]  # ours
    with pytest.raises(UserError, match="resize=bilinear: choose processor or rlds"):
        read_conventions(tmp_path, base, OpenVLAOptions(resize="bilinear"))


def test_the_crop_is_configured_and_stored_in_the_checkpoint(tmp_path: Path) -> None:
    plain = tiny()
    cropping = tiny(center_crop=True, resize="rlds")
    observed = observations(plain, 2)
    seen = observed.images["base"]
    assert torch.equal(plain.prepare(observed)["image.base"], resize(seen, (64, 64)))
    assert torch.equal(
        cropping.prepare(observed)["image.base"], center_crop(lanczos(through_jpeg(seen), (64, 64)))
    )
    for policy in (
        plain,
        cropping,
    ):  # the environment may have made the round trip, here of other images
        shown = replace(observed, jpeg={"base": 255 - seen})
        expected = (
            resize(seen, (64, 64))
            if policy is plain
            else center_crop(lanczos(255 - seen, (64, 64)))
        )
        assert torch.equal(policy.prepare(shown)["image.base"], expected)
    cropping.save(tmp_path)
    again = OpenVLAPolicy.load(tmp_path, OpenVLAOptions())
    assert torch.equal(
        again.prepare(observed)["image.base"], cropping.prepare(observed)["image.base"]
    )


STATISTICS = {"q01": [-1.0, 0.0], "q99": [1.0, 1.0], "mask": [True, False]}
OPENNESS = torch.tensor([0.1, 0.4, 0.6, 0.9])


def decoded(gripper: str) -> list[float]:
    """The last dimension, for OPENNESS of a model whose gripper is 0 closed to 1 open."""
    tokenizer = ActionTokenizer(32000, 256, STATISTICS, gripper)
    return tokenizer.denormalise(torch.stack([torch.zeros(4), OPENNESS], dim=-1))[:, 1].tolist()


def test_gripper_sign_and_threshold() -> None:
    """LIBERO closes at +1: the official ``2 g - 1``, its sign, inverted. Raw numbers never open it; a threshold of 0 always does."""
    libero = (-torch.sign(2 * OPENNESS - 1)).tolist()
    assert libero == [1, 1, -1, -1] == decoded("close_positive")
    assert decoded("open_positive") == [-value for value in libero]
    assert decoded("raw") == pytest.approx(OPENNESS.tolist())
    assert (-torch.sign(OPENNESS)).tolist() != libero


@pytest.mark.parametrize("gripper", ["open_positive", "close_positive"])
def test_demonstrations_are_converted_to_the_models_gripper_sign(gripper: str) -> None:
    tokenizer = ActionTokenizer(32000, 256, STATISTICS, gripper)
    actions = torch.tensor([[0.5, 1.0], [0.5, -1.0]])
    assert tokenizer.decode(tokenizer.encode(actions))[:, 1].tolist() == [1, -1]
    openness = tokenizer.normalise(actions)[:, 1].tolist()
    assert openness == ([1, 0] if gripper == "open_positive" else [0, 1])


def test_a_gripper_outside_the_mask_is_not_unnormalised() -> None:
    tokenizer = ActionTokenizer(32000, 256, STATISTICS | {"q99": [1.0, 0.2]})
    assert tokenizer.denormalise(torch.tensor([0.0, 1.0]))[1] == 1
    unmasked = ActionTokenizer(32000, 256, {"q01": [-1.0, 0.0], "q99": [1.0, 0.2]})
    assert unmasked.denormalise(torch.tensor([0.0, 1.0]))[1] == pytest.approx(0.2)


def test_the_statistics_of_another_dataset(tmp_path: Path) -> None:
    both = {
        name: {"action": {"q01": [-scale], "q99": [scale]}}
        for name, scale in (("mine", 0.05), ("bridge_orig", 1.0))
    }
    (tmp_path / "dataset_statistics.json").write_text(json.dumps({"mine": both["mine"]}))
    fine_tuned = read_statistics(tmp_path, {"norm_stats": both}, None, None)
    assert fine_tuned.name == "mine"
    assert ActionTokenizer(32000, 256, fine_tuned.statistics["action"]).denormalise(
        torch.ones(1)
    ) == pytest.approx(0.05)
    (tmp_path / "dataset_statistics.json").unlink()
    for wrong in (None, "libero"):
        with pytest.raises(UserError, match=r"'bridge_orig', 'mine'.*choose one"):
            read_statistics(tmp_path, {"norm_stats": both}, wrong, None)


def test_minimum_and_maximum_instead_of_quantiles() -> None:
    """OpenVLA: ``q01 + (a + 1) / 2 (q99 - q01)``; datasets contain min and max, too."""
    statistics = {"q01": [-0.1], "q99": [0.3], "min": [-2.0], "max": [2.0]}
    assert ActionTokenizer(32000, 256, statistics).denormalise(
        torch.tensor([0.5])
    ) == pytest.approx(0.2)
    assert ActionTokenizer(32000, 256, {"q01": [-2.0], "q99": [2.0]}).denormalise(
        torch.tensor([0.5])
    ) == pytest.approx(1.0)
    proprio = ProprioNormalizer(statistics)
    assert proprio(torch.tensor([0.2])) == pytest.approx(0.5) and proprio(torch.tensor([2.0])) == 1
    assert ActionTokenizer(32000, 256, statistics, bounds="min_max").denormalise(
        torch.tensor([0.5])
    ) == pytest.approx(1.0)
    assert ProprioNormalizer(statistics, "min_max")(torch.tensor([0.2])) == pytest.approx(0.1)


def test_proprioception_outside_the_mask_is_only_clipped() -> None:
    """OFT: ``np.clip(np.where(mask, scaled, proprio), -1, 1)``."""
    proprio = ProprioNormalizer(
        {"q01": [-0.2, -0.2, -0.2], "q99": [0.2, 0.2, 0.2], "mask": [True, False, False]}
    )
    torch.testing.assert_close(
        proprio(torch.tensor([0.1, 0.1, -3.0])), torch.tensor([0.5, 0.1, -1.0])
    )


def test_targets_are_clipped_and_constant_dimensions_are_zero() -> None:
    """As the official data; a division by the empty range would give NaN."""
    tokenizer = ActionTokenizer(32000, 256, {"q01": [-0.5, 0.3], "q99": [0.5, 0.3]})
    found = tokenizer.normalise(torch.tensor([[0.25, 0.3], [9.0, 0.2], [-9.0, 0.4]]))
    assert found.tolist() == [[0.5, 0], [1, 0], [-1, 0]]
    assert tokenizer.encode(torch.tensor([0.0, 0.3])).diff().item() == 0, "the token of 0"
    assert tokenizer.denormalise(found)[:, 1].tolist() == pytest.approx([0.3] * 3)


def test_pi05_uses_quantiles_and_pi0_standard_deviations(tmp_path: Path) -> None:
    fixture = Fixture("openpi_preproc")
    statistics = fixture.json("norm_stats.json")["norm_stats"]["actions"]
    for quantiles, mode, other in (
        (False, "MEAN_STD", "QUANTILES"),
        (True, "QUANTILES", "MEAN_STD"),
    ):
        expected = fixture.expected[f"norm_actions_q{int(quantiles)}"]
        actions = fixture.inputs["actions"]
        assert difference(Normalizer(statistics, mode)(actions), expected) <= 1e-12
        assert difference(Normalizer(statistics, other)(actions), expected) > 0.5
        assert (
            small_pi0(tmp_path / str(quantiles), pi05=quantiles).action_normalizer.to_range
            == quantiles
        )


@torch.no_grad()
def test_a_shorter_chunk_than_oft_was_trained_on() -> None:
    """All slots attend to each other: half as many predict other actions, not the first half of them."""
    fixture = Fixture("oft_tiny")
    network = PrismaticVLA(fixture.config, bidirectional=True)
    network.load_state_dict(fixture.weights)
    ids = prompts(fixture)[0]
    expected = fixture.expected["discrete1_action_hidden_0"]
    mask = torch.ones_like(ids, dtype=torch.bool)
    patches = network.encode_images(fixture.inputs["pixel_values_1img"][:1], ids, mask)
    embeds, mask = network.embed_prompt(patches, ids, mask)
    assert difference(slot_states(network, embeds, mask, len(expected), 2)[0], expected) <= 2e-5
    half = len(expected) // 2
    assert difference(slot_states(network, embeds, mask, half, 2)[0], expected[:half]) > 1e-2


@torch.no_grad()
def test_pi0_denoises_its_full_horizon_for_any_number_of_executed_actions(tmp_path: Path) -> None:
    whole = small_pi0(tmp_path / "whole")
    part = small_pi0(tmp_path / "part", chunk=2)
    observed = observations(whole, 2)
    found = [act(policy, policy.prepare(observed)).actions for policy in (whole, part)]
    assert part.spec.chunk == 2 and torch.equal(found[0][:, :2], found[1])
    part.horizon = 2
    part.backbone.config = replace(part.config, horizon=2)
    shorter = act(part, part.prepare(observed)).actions
    assert difference(shorter, found[0][:, :2]) > 1e-2


def test_absolute_actions_taken_for_deltas() -> None:
    fixture = Fixture("openpi_preproc")
    inputs = fixture.inputs
    expected = fixture.expected
    mask = fixture.expected["delta_mask"]
    dimensions = delta_dimensions([6, -1], len(mask), len(inputs["state"]))
    assert dimensions == mask.nonzero()[:, 0].tolist()
    state, actions = inputs["state"], inputs["actions"]
    deltas = relative(actions, state, dimensions)
    assert difference(deltas, expected["delta_actions"]) <= 1e-12
    assert difference(absolute(actions, state, dimensions), expected["absolute_actions"]) <= 1e-12
    assert difference(absolute(deltas, state, dimensions), actions) <= 1e-12
    assert difference(actions, expected["absolute_actions"]) > 0.1  # the state never added
    everything = delta_dimensions([7], len(mask), len(state))  # the gripper too
    assert difference(relative(actions, state, everything), expected["delta_actions"]) > 0.1


@torch.no_grad()
def test_pi0_adds_the_robots_state_and_not_the_normalised_one(tmp_path: Path) -> None:
    plain = small_pi0(tmp_path / "plain")
    delta = small_pi0(tmp_path / "delta", delta_mask=[3, -1])
    observed = observations(plain, 2)
    inputs = plain.prepare(observed)
    expected = (
        act(plain, inputs).actions
        + torch.cat([observed.state[:, :3], torch.zeros(2, 1)], dim=1)[:, None]
    )
    found = act(delta, inputs).actions
    assert difference(found, expected) <= 1e-5
    assert difference(found, act(plain, inputs).actions + inputs["state"][:, None, :4]) > 0.1
    # the imitation loss is that of the same deltas
    losses = [
        policy.supervised_loss(inputs, actions, noise(torch.arange(2)))
        for policy, actions in ((plain, found), (delta, found))
    ]
    deltas = act(plain, inputs).actions
    assert (
        difference(losses[1], plain.supervised_loss(inputs, deltas, noise(torch.arange(2)))) <= 1e-4
    )
    assert difference(losses[0], losses[1]) > 1e-2


def test_a_delta_mask_is_stored_in_the_checkpoint_and_must_fit(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    small_pi0(tmp_path / "small", delta_mask=[3, -1]).save(saved)
    assert Pi0Policy.load(saved, Pi0Options(prompt_length=32)).delta == [0, 1, 2]
    with pytest.raises(UserError, match=r"delta_mask=\[6, -1\] covers 7 dimensions"):
        small_pi0(tmp_path / "other", delta_mask=[6, -1])


def test_proprioception_by_the_statistics_of_actions(tmp_path: Path) -> None:
    """OFT: ``clip(2 (s - q01) / (q99 - q01) - 1)`` with those of the state, 8 numbers in LIBERO."""
    directory = smaller_directory(tmp_path / "small", smaller_config())
    policy = OpenVLAOFTPolicy.load(directory, OpenVLAOFTOptions(random_weights=True, proprio=True))
    statistics = json.loads((directory / "dataset_statistics.json").read_text())["maniskill"]
    observed = observations(policy, 2)
    state, low, high = (
        np.asarray(x)
        for x in (observed.state, statistics["proprio"]["q01"], statistics["proprio"]["q99"])
    )
    expected = torch.from_numpy(np.clip(2 * (state - low) / (high - low + 1e-8) - 1, -1, 1))
    found = policy.prepare(observed)["proprio"]
    assert difference(found, expected) <= 1e-6
    width = policy.spec.action_dim
    assert (
        difference(
            ProprioNormalizer(statistics["action"])(observed.state[:, :width]), expected[:, :width]
        )
        > 0.1
    )

"""What the conformance suite does not ask of a policy in two places: adapters, what trains and is published, bfloat16, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import LoraOptions
from rlinf_vla.core import plugins
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import Tensors
from rlinf_vla.models.openvla.oft import OpenVLAOFTPolicy
from rlinf_vla.models.openvla.options import OpenVLAOFTOptions
from rlinf_vla.models.pi0.options import Pi0Options
from rlinf_vla.models.pi0.policy import Pi0Policy
from rlinf_vla.rollout.actor import Actor, Settings, nbytes
from rlinf_vla.rollout.split import (
    FeatureServer,
    head_weights,
    load_head,
    require_separable,
    strip_to_head,
)
from rlinf_vla.testing.policy_calls import act, assert_the_same_bits, observations, split
from rlinf_vla.training.lora import acting, add_lora, is_lora, merged_lora
from tests.models.test_openvla_oft import small as small_oft
from tests.models.test_pi0 import small as small_pi0
from tests.models.tiny_openvla import ASSETS
from tests.rollout.test_actor import Recorder

SETTINGS = Settings(run_seed=5, temperature=1.0, batch_size=3)


def oft(directory: Path, **options: Any) -> Policy:
    return small_oft(directory, options=options)


def l1(directory: Path) -> Policy:
    return small_oft(directory, head="l1")


def pi0(directory: Path, **options: Any) -> Policy:
    return small_pi0(directory, **{"frozen_vlm": True} | options)


def in_two_places(policy: Policy, **lora: Any) -> tuple[Policy, Policy]:
    """``policy`` with adapters, and the same without weights."""
    options = LoraOptions(**{"rank": 4} | lora)
    blank = type(policy).without_weights(policy.directory, policy.options)  # type: ignore[arg-type]
    with torch.device("meta"):
        add_lora(blank, options, seed=0)
    assert all(parameter.is_meta for parameter in blank.backbone.parameters())
    add_lora(policy, options, seed=0)
    train(policy)
    return policy, blank


@torch.no_grad()
def train(policy: Policy) -> None:
    """Some other weights, everywhere where weights train."""
    for index, parameter in enumerate(p for p in policy.parameters() if p.requires_grad):
        change = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
        parameter += 0.1 * change.to(parameter.dtype) / parameter.shape[-1] ** 0.5


def what_trains(policy: Policy) -> Tensors:
    return head_weights(
        policy,
        {
            name: parameter.detach()
            for name, parameter in policy.named_parameters()
            if parameter.requires_grad
        },
    )


EVERY = [
    pytest.param(oft, {}, id="oft"),
    pytest.param(oft, {"rank": 0}, id="oft-all-weights"),
    pytest.param(oft, {"targets": ["q_proj", "lm_head"]}, id="oft-output-layer-adapted"),
    pytest.param(l1, {}, id="oft-l1"),
    pytest.param(lambda path: oft(path, dtype="bfloat16"), {}, id="oft-bfloat16"),
    pytest.param(
        lambda path: oft(path, dtype="bfloat16"),
        {"targets": ["lm_head"]},
        id="oft-bfloat16-output-layer-adapted",
    ),
    pytest.param(pi0, {}, id="pi0"),
    pytest.param(pi0, {"rank": 0}, id="pi0-all-weights"),
    pytest.param(lambda path: pi0(path, frozen_vlm=False, value_on="vlm"), {}, id="pi0-vlm"),
    pytest.param(
        lambda path: pi0(path, dtype="bfloat16", sampler="flow_noise"),
        {},
        id="pi0-bfloat16-flow-noise",
    ),
    pytest.param(lambda path: pi0(path, pi05=True, dtype="bfloat16"), {}, id="pi05-bfloat16"),
]


@pytest.mark.parametrize(("make", "lora"), EVERY)
def test_a_head_with_adapters_follows_the_trainer(
    tmp_path: Path, make: Callable[[Path], Policy], lora: dict[str, Any]
) -> None:
    policy, blank = in_two_places(make(tmp_path / "model"), **lora)
    whole = Actor(policy, SETTINGS)
    actor = split(policy, blank, SETTINGS)
    inputs = policy.prepare(observations(policy, 5))

    def check() -> None:
        with merged_lora(policy), merged_lora(blank):
            assert_the_same_bits(actor, whole, inputs)

    check()
    train(policy)
    with pytest.raises(AssertionError):
        check()
    own = dict(blank.named_parameters())
    published = what_trains(policy)
    assert published.keys() == {name for name, parameter in own.items() if parameter.requires_grad}
    with torch.no_grad():
        for name, value in published.items():
            own[name].copy_(value)
    check()


def test_what_a_head_is(tmp_path: Path) -> None:
    """Of OFT the action tokens' rows of the output layer; of all of it where adapters are on it. Of π₀ the expert, without the layer that
    is never run."""
    policy, blank = in_two_places(oft(tmp_path / "oft"))
    assert set(what_trains(policy)) == {
        name for name, _ in policy.named_parameters() if name.startswith("value_head.")
    }
    once = head_weights(policy, policy.state_dict())
    assert once.keys() - what_trains(policy).keys() == {"backbone.language_model.lm_head.weight"}
    assert once["backbone.language_model.lm_head.weight"].shape == (8, 32)
    strip_to_head(blank)
    assert {name for name, _ in blank.named_parameters()} == once.keys()

    policy, _ = in_two_places(oft(tmp_path / "adapted"), targets=["lm_head"])
    layer = "backbone.language_model.lm_head."
    shapes = {
        name.removeprefix(layer): tuple(value.shape)
        for name, value in head_weights(policy, policy.state_dict()).items()
    }
    assert shapes["base_layer.weight"] == (512, 32) and shapes["lora_B.default.weight"] == (512, 4)

    policy, _ = in_two_places(pi0(tmp_path / "pi0"))
    once = head_weights(policy, policy.state_dict())
    trained = what_trains(policy)
    assert not any(".paligemma." in name or ".lm_head." in name for name in once)
    assert (
        any(is_lora(name) for name in trained)
        and "backbone.action_out_proj.weight" in trained
        and "value_head.0.weight" in trained
    )
    assert (
        "backbone.paligemma_with_expert.gemma_expert.model.norm.weight"
        in once.keys() - trained.keys()
    )


def test_a_head_takes_its_own_weights_only(tmp_path: Path) -> None:
    policy, blank = in_two_places(oft(tmp_path / "oft"))
    weights = head_weights(policy, policy.state_dict())
    name = "backbone.language_model.lm_head.weight"
    strip_to_head(blank)
    for wrong in (
        {**weights, name: policy.backbone.language_model.lm_head.weight},
        {**weights, "other": weights[name]},
        {},
    ):  # type: ignore[union-attr,dict-item]
        with pytest.raises(RuntimeError, match="Error\\(s\\) in loading state_dict"):
            load_head(blank, wrong, "cpu")
    load_head(blank, weights, "cpu")
    before = blank.get_parameter(name).clone()
    weights[name].detach().zero_()
    assert torch.equal(blank.get_parameter(name), before), "a copy"


def test_both_sides_record(tmp_path: Path) -> None:
    """As on a GPU: the server its pass, the head its own, each per shape."""
    policy, blank = in_two_places(oft(tmp_path / "oft"))
    strip_to_head(blank)
    load_head(blank, head_weights(policy, policy.state_dict()), "cpu")
    server = FeatureServer(policy)
    actor = Actor(blank, SETTINGS, server.encode)
    recorder = Recorder()
    server.record(recorder)
    actor.record(recorder)
    for count in (5, 3, 6):
        inputs = policy.prepare(observations(policy, count, seed=count))
        assert_the_same_bits(actor, Actor(policy, SETTINGS), inputs)
    assert [each.recordings for each in recorder.made] == [2, 2, 2]


def test_bytes_are_counted_per_block(tmp_path: Path) -> None:
    policy, blank = in_two_places(pi0(tmp_path / "pi0", dtype="bfloat16"))
    actor = split(policy, blank, SETTINGS)
    inputs = policy.prepare(observations(policy, 7))
    actor.values(inputs)
    # an image of 32 x 32, 32 token ids with their mask, six numbers of the state
    assert (actor.requests, actor.sent) == (3, 7 * (3 * 32 * 32 + 32 * (8 + 1) + 6 * 4))
    # of 4 patches and 32 tokens: 2 layers' keys and values of 8 numbers, a mask; what the critic reads, 24 numbers; the state in float32
    assert actor.received == 7 * (36 * (2 * 2 * 8 * 2 + 1) + 24 * 2 + 6 * 4)
    assert nbytes({}) == 0


def test_models_that_cannot_be_split_say_why() -> None:
    models = plugins.models()
    refused = {name for name, model in models.items() if model.split_unsupported is not None}
    assert refused - {"remote"} == {"openvla", "causal_lm"} and models.keys() >= {
        "compact",
        "openvla_oft",
        "pi0",
    }
    with pytest.raises(
        UserError,
        match=r"rollout\.split=head: model=openvla passes every action token through its whole language model",
    ):
        require_separable(models["openvla"])


def test_a_policy_that_says_nothing_is_refused() -> None:
    class Other(Policy):
        name = "other"

    with pytest.raises(
        UserError, match="model=other does not declare which of its modules form the action head"
    ):
        require_separable(Other)


@pytest.mark.parametrize(
    ("model", "asset", "options"),
    [
        (
            OpenVLAOFTPolicy,
            "openvla_oft_tiny_pushcube",
            OpenVLAOFTOptions(prompt_length=26, dtype="bfloat16"),
        ),
        (
            Pi0Policy,
            "pi0_tiny_pushcube",
            Pi0Options(prompt_length=16, denoise_steps=4, dtype="bfloat16"),
        ),
    ],
)
def test_what_adapters_rounded_to_bfloat16_change(
    model: type[Policy], asset: str, options: Any
) -> None:
    """docs/split.md: as much as any other change of a network in bfloat16, which is not nothing."""
    policy = model.load(ASSETS / asset, options)
    add_lora(policy, LoraOptions(rank=32), seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.03, generator=generator)
    inputs = policy.prepare(observations(policy, 64))
    with acting(policy, rounded=True):
        sample = act(policy, inputs)
    with torch.no_grad(), acting(policy, rounded=False):
        moved = (policy.evaluate(inputs, sample.latent, 1.0).log_prob - sample.log_prob).abs()
    assert 0 < moved.mean() < 0.01

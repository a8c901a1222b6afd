"""rollout.split=head with the backbone on our server, in this process: the same bits, what the head holds, what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.benchmarks.synthetic_cell import SPACE
from rlinf_vla.config.errors import Failure, UserError
from rlinf_vla.config.recipe import LoraOptions, ModelConfig, NoAlgorithmConfig, Recipe
from rlinf_vla.config.robot import ControlConfig
from rlinf_vla.core import plugins
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import Episodes
from rlinf_vla.features.realworld.clock import Clock
from rlinf_vla.features.realworld.control_actor import ControlActor, require_fit
from rlinf_vla.features.realworld.inference import Chunk, InferenceWorker, Request
from rlinf_vla.features.serving.array_messages import MessageError, pack, unpack
from rlinf_vla.features.serving.backbone import combined, digest_of_backbone, fingerprint
from rlinf_vla.features.serving.feature_messages import (
    as_arrays,
    description,
    read_description,
    read_features,
)
from rlinf_vla.features.serving.observations import NATIVE
from rlinf_vla.features.serving.service import opened
from rlinf_vla.models.compact.policy import CompactOptions, CompactPolicy
from rlinf_vla.models.openvla.oft import OpenVLAOFTPolicy
from rlinf_vla.models.openvla.options import OpenVLAOFTOptions, OpenVLAOptions
from rlinf_vla.models.openvla.policy import OpenVLAPolicy
from rlinf_vla.models.pi0.policy import Pi0Options, Pi0Policy
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.split import head_weights
from rlinf_vla.runtime import builders
from rlinf_vla.testing.policy_calls import assert_the_same_bits, observations, with_critic
from rlinf_vla.testing.toy_env import CounterConfig
from rlinf_vla.training.checkpoint import load_checkpoint, save_checkpoint
from rlinf_vla.training.lora import acting
from tests.features.realworld.test_control_actor import seen
from tests.features.realworld.virtual_time import VirtualClock
from tests.features.serving.conftest import Running, Start, first_two_chunks
from tests.models.policy_servers import PolicyServer, serving
from tests.models.tiny_openvla import ASSETS

SETTINGS = Settings(run_seed=5, temperature=1.0, batch_size=3)
MODELS: dict[str, tuple[type[Policy], Any]] = {
    "pi0": (Pi0Policy, Pi0Options(denoise_steps=3)),
    "pi0 in bfloat16": (Pi0Policy, Pi0Options(denoise_steps=3, dtype="bfloat16")),
    "openvla_oft": (OpenVLAOFTPolicy, OpenVLAOFTOptions()),
    "compact": (CompactPolicy, CompactOptions()),
}


@pytest.fixture
def recipe(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Recipe:
    """A recipe of a model with weights in files, on the server and at the head: of π₀, or as parametrised."""
    model, options = MODELS[getattr(request, "param", "pi0")]
    return recipe_of(model, options, tmp_path, monkeypatch)


def recipe_of(
    model: type[Policy], options: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int = 0
) -> Recipe:
    monkeypatch.setattr(
        plugins, "models", lambda: {each.name: each for each in (model, OpenVLAPolicy)}
    )
    directory = ASSETS / f"{model.name}_tiny_pushcube"
    if model is CompactPolicy:
        directory = folder / "compact"
        if not directory.exists():
            directory.mkdir()
            CompactPolicy.load(ASSETS / "compact", replace(options, random_weights=True)).save(
                directory
            )
    node = ModelConfig(model.name, str(directory), options, LoraOptions(rank=rank))
    return Recipe(
        name="toy",
        iterations=0,
        seed=7,
        env=CounterConfig(state_dim=8),
        model=node,
        algorithm=NoAlgorithmConfig(),
    )


def at(recipe: Recipe, url: str, **options: Any) -> Recipe:
    """The recipe of the head's machine."""
    backbone = replace(recipe.rollout.backbone, url=url, timeout_s=30.0, retries=0, **options)
    return replace(recipe, rollout=replace(recipe.rollout, split="head", backbone=backbone))


every_model = pytest.mark.parametrize("recipe", list(MODELS), indirect=True)


@every_model
def test_the_same_bits_as_the_whole_policy(recipe: Recipe, start: Start) -> None:
    whole = builders.build_policy(recipe)
    obs = observations(whole, 5)
    with start() as running:
        head = Actor(builders.build_policy(at(recipe, running.url())), SETTINGS)
        inputs = Actor(whole, SETTINGS).prepare(obs)
        sent = head.prepare(obs)
        assert_the_same_bits(FedByObservations(head, sent), Actor(whole, SETTINGS), inputs)
    packed = whole.pack(whole.encode(inputs))
    assert head.requests == 4 and head.received == 2 * sum(
        value.nbytes for value in packed.values()
    ), "once to act, once to value"


class FedByObservations:
    """An actor that takes what it is sent in place of the inputs of the whole policy."""

    def __init__(self, actor: Actor, sent: dict[str, torch.Tensor]) -> None:
        self.actor = actor
        self.sent = sent

    def act(self, inputs: Any, *keys: Any) -> Any:
        return self.actor.act(self.sent, *keys)

    def values(self, inputs: Any) -> Any:
        return self.actor.values(self.sent)


@every_model
def test_the_head_holds_and_loads_nothing_of_the_backbone(
    recipe: Recipe, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose weights are on meta when it is built, and are read one at a time for their digest."""
    whole = builders.build_policy(recipe)
    model = type(whole)
    with start() as running:
        made: list[Policy] = []
        without_weights = model.without_weights

        def built(checkpoint: Path, config: Any) -> Policy:
            made.append(without_weights(checkpoint, config))
            assert model is CompactPolicy or all(
                weight.is_meta for weight in made[0].backbone.parameters()
            )
            return made[0]

        monkeypatch.setattr(model, "without_weights", built)
        monkeypatch.setattr(model, "load_weights", None)
        monkeypatch.setattr(model, "load", None)
        head = builders.build_policy(at(recipe, running.url()))
    wanted = head_weights(whole, whole.state_dict())
    assert head is made[0] and {name: value.shape for name, value in head.state_dict().items()} == {
        name: value.shape for name, value in wanted.items()
    }
    for name, value in head.state_dict().items():
        assert torch.equal(value, wanted[name]) and value.dtype == wanted[name].dtype, name
    count = sum(each.numel() for each in whole.parameters())
    assert (
        sum(each.numel() for each in head.parameters())
        < (0.5 if model is not CompactPolicy else 0.9) * count
    )


@contextmanager
def serving_of(recipe: Recipe, start: Start) -> Iterator[Running]:
    with start(lambda: opened(recipe)) as running:
        yield running


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_control_loop_gets_the_chunks_of_the_whole_policy(
    recipe: Recipe, start: Start, temperature: float
) -> None:
    """Also those that continue committed actions, which the server does not know."""
    with serving_of(recipe, start) as running:
        elsewhere = builders.build_policy(at(recipe, running.url()))
        first, second = first_two_chunks(elsewhere, temperature)
    wanted, continued = first_two_chunks(builders.build_policy(recipe), temperature)
    for chunk, same in ((first, wanted), (second, continued)):
        assert np.array_equal(chunk.actions, same.actions)
        assert chunk.sections.keys() == {"prepare", "encode", "act"}


def test_requests_in_flight_have_connections_of_their_own(recipe: Recipe, start: Start) -> None:
    """And each gets its own features, whatever the order of the answers."""
    clock = Clock()
    config = ControlConfig(requests_in_flight=3)
    shown = seen(VirtualClock())
    images = [np.full_like(shown.frames["base"].image, 100 * number) for number in range(3)]
    readings = [
        replace(shown, frames={"base": replace(shown.frames["base"], image=image)})
        for image in images
    ]
    requests = [
        Request(reading, "push the cube", number, number) for number, reading in enumerate(readings)
    ]
    whole = builders.build_policy(recipe)
    with pytest.raises(
        UserError, match="requests_in_flight=3 is for a head whose backbone is elsewhere"
    ):
        require_fit(whole, SPACE, ["base"], config)
    wanted = [ControlActor(whole, Settings(3, 0.0, 1), clock)(each).actions for each in requests]
    assert not np.array_equal(wanted[0], wanted[1])
    with start() as running:
        head = builders.build_policy(at(recipe, running.url()))
        require_fit(head, SPACE, ["base"], config)
        background = InferenceWorker(
            ControlActor(head, Settings(3, 0.0, 1), clock), clock, config.requests_in_flight
        )
        found: list[Chunk] = []
        for each in requests:
            background.submit(each)
            while background.pending()[1] is not None:
                background.wait(clock.now() + 0.01)
        while len(found) < 3:
            background.wait(clock.now() + 1.0)
            found += background.take()
        background.close()
    for chunk in found:
        assert np.array_equal(chunk.actions, wanted[chunk.request.step])


def test_a_server_that_is_gone_is_an_error_at_once_in_a_control_loop(
    recipe: Recipe, start: Start
) -> None:
    with serving_of(recipe, start) as running:
        policy = builders.build_policy(at(recipe, running.url()))
        policy.elsewhere.begin_control()  # type: ignore[union-attr]
        actor = ControlActor(policy, Settings(3, 0.0, 1), VirtualClock())
        actor(Request(seen(VirtualClock()), "push the cube", 0, 0))
    with pytest.raises(Failure, match=r"does not answer: ws://.* cannot be connected to"):
        actor(Request(seen(VirtualClock()), "push the cube", 1, 1))


def trained(recipe: Recipe, seed: int, folder: Path, backbone: bool) -> Path:
    """A checkpoint of a run with other adapters and heads; ``backbone``: those of the backbone too."""
    policy = with_critic(builders.build_policy(recipe))
    generator = torch.Generator().manual_seed(seed)
    head = head_weights(policy, policy.state_dict())
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.requires_grad and (backbone or name in head):
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    trainer = builders.build_trainer(
        replace(recipe, algorithm=plugins.algorithms()["ppo"].Config()), policy
    )
    return save_checkpoint(folder, policy, trainer, {"iteration": seed, "policy_version": 0}, 9)


@pytest.mark.parametrize("model", ["pi0", "openvla_oft"])
@pytest.mark.parametrize("rank", [0, 4])
def test_a_checkpoint_of_a_run(
    model: str, rank: int, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head reads its part, and its digest follows the backbone's part."""
    kind, options = MODELS[model]
    recipe = recipe_of(
        kind,
        options if model == "openvla_oft" else replace(options, frozen_vlm=False),
        tmp_path,
        monkeypatch,
        rank,
    )
    first, other = (trained(recipe, seed, tmp_path / "run", backbone=True) for seed in (1, 2))
    whole = builders.build_policy(recipe)
    load_checkpoint(first, whole)
    obs = observations(whole, 3)
    with serving_of(replace(recipe, checkpoint=str(first)), start) as running:
        head = builders.build_policy(at(recipe, running.url()))
        load_checkpoint(first, head)
        actor = Actor(head, SETTINGS)
        with acting(whole, False), acting(head, False):
            assert_the_same_bits(
                FedByObservations(actor, actor.prepare(obs)),
                Actor(whole, SETTINGS),
                Actor(whole, SETTINGS).prepare(obs),
            )
        load_checkpoint(other, head)
        with pytest.raises(
            UserError,
            match=r"has another backbone \(SHA-256 \w{12}\) than the head here was trained on",
        ):
            actor.values(actor.prepare(obs))


def test_heads_of_one_frozen_backbone_share_a_server(
    recipe: Recipe, tmp_path: Path, start: Start
) -> None:
    """A checkpoint of a run that trains the head only fits the server of the initial model."""
    adapted = replace(recipe, model=replace(recipe.model, lora=LoraOptions(rank=4)))
    checkpoint = trained(adapted, 1, tmp_path / "run", backbone=False)
    whole = builders.build_policy(adapted)
    load_checkpoint(checkpoint, whole)
    obs = observations(whole, 2)
    with serving_of(recipe, start) as running:
        head = builders.build_policy(at(adapted, running.url()))
        load_checkpoint(checkpoint, head)
        actor = Actor(head, SETTINGS)
        with acting(whole, False), acting(head, False):
            found, wanted = (
                each.act(each.prepare(obs), *keys(2)) for each in (actor, Actor(whole, SETTINGS))
            )
    assert torch.equal(found.actions, wanted.actions)


def keys(rows: int) -> tuple[Any, torch.Tensor]:
    count = torch.arange(rows)
    return Episodes.first_attempts(count, count), count


def test_what_does_not_fit_is_one_line(
    recipe: Recipe, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(recipe: Recipe) -> str:
        with pytest.raises(UserError) as found:
            policy = builders.build_policy(recipe)
            actor = Actor(policy, SETTINGS)
            actor.values(actor.prepare(observations(policy, 1)))
        assert "\n" not in str(found.value)
        return str(found.value)

    with serving_of(recipe, start) as running:
        there = at(recipe, running.url())
        options = replace(recipe.model, options=Pi0Options(denoise_steps=4))
        assert "has model.options.denoise_steps=3, here it is 4: give both the same" in refusal(
            replace(there, model=options)
        )
        other = tmp_path / "other"
        policy = builders.build_policy(recipe)
        with torch.no_grad():
            next(policy.backbone.paligemma_with_expert.paligemma.parameters()).add_(1e-3)
        other.mkdir()
        policy.save(other)
        assert "has another backbone (SHA-256 " in refusal(
            replace(there, model=replace(recipe.model, checkpoint=str(other)))
        )
        monkeypatch.setattr(Pi0Policy, "name", "pi1")
        monkeypatch.setattr(plugins, "models", lambda: {"pi1": Pi0Policy})
        assert "serves model=pi0, the head here is of model=pi1" in refusal(
            replace(there, model=replace(recipe.model, name="pi1"))
        )
    monkeypatch.setattr(plugins, "models", lambda: {"openvla": OpenVLAPolicy})
    whole = ModelConfig(
        "openvla", str(ASSETS / "openvla_tiny_pushcube"), OpenVLAOptions(), LoraOptions(rank=0)
    )
    assert refusal(at(replace(recipe, model=whole), "ws://127.0.0.1:1")).startswith(
        "rollout.split=head: model=openvla passes every action token through its whole language model"
    )


def test_other_servers_are_one_line(recipe: Recipe) -> None:
    def refusal(metadata: Any) -> str:
        with (
            serving(PolicyServer(lambda _: None, metadata)) as url,
            pytest.raises(UserError) as found,
        ):
            builders.build_policy(at(recipe, url))
        return str(found.value)

    assert "is no server of rlinf-vla, so it has no backbone for a head" in refusal({"openpi": 1})
    ours: dict[str, Any] = {"policy": {"model": "pi0"}}
    assert "serves no backbone without its head" in refusal({"rlinf_vla": ours})
    split = {"backbone": "12", "options": asdict(recipe.model.options)}
    for features in (
        None,
        {},
        {"a": {"dtype": "object", "shape": [1]}},
        {"a": {"dtype": "float32", "shape": [1 << 40]}},
    ):
        assert "describes its policy wrongly" in refusal(
            {"rlinf_vla": ours | {"split": split | {"features": features}}}
        )
    with pytest.raises(
        UserError, match=r"rollout\.backbone\.url=ws://127\.0\.0\.1:1: .*start the server first"
    ):
        builders.build_policy(at(recipe, "ws://127.0.0.1:1"))


def test_requests_that_the_server_refuses(recipe: Recipe) -> None:
    image = np.zeros((64, 64, 3), np.uint8)
    with opened(recipe) as service:
        digest = service.metadata["split"]["backbone"]
        assert digest == digest_of_backbone(builders.build_policy(recipe))
        shown = {
            "images": {"base": image},
            "state": np.zeros(8, np.float32),
            "instruction": "push",
            "encode": digest,
        }

        def refusal(**changes: Any) -> str:
            with pytest.raises(MessageError) as found:
                service.request(shown | changes, NATIVE, 0, 0, encodes=True)
            return str(found.value)

        for wrong in (0, None, "12", b"x", [digest], np.zeros(3)):
            assert "another SHA-256" in refusal(encode=wrong)
        assert "do not depend on committed actions" in refusal(
            committed=np.zeros((1, 1, 4), np.float32)
        )
        assert (
            service.request(shown, NATIVE, 0, 0, encodes=True).encode
            and not service.request(shown, NATIVE, 0, 0).encode
        )
        requests = [
            service.request(shown | {"instruction": text}, NATIVE, 0, 0, encodes=True)
            for text in ("push", "pull")
        ]
        acts = service.request(
            {name: value for name, value in shown.items() if name != "encode"}, NATIVE, 0, 0
        )
        together = service.answer([requests[0], acts, requests[1]])
        assert together[1].actions.shape == (4, 4) and together[1].features is None  # type: ignore[union-attr]
        for request, found in zip(requests, (together[0], together[2]), strict=True):
            (alone,) = service.answer([request])
            assert alone.features.keys() == service.metadata["split"]["features"].keys()  # type: ignore[union-attr]
            for name, value in alone.features.items():  # type: ignore[union-attr]
                np.testing.assert_allclose(found.features[name], value, atol=1e-5)  # type: ignore[union-attr,index]
        service.defaults = replace(service.defaults, most_rows=1 << 20)
        many = {
            "images": {"base": np.zeros((3000, 64, 64, 3), np.uint8)},
            "state": np.zeros((3000, 8), np.float32),
        }
        assert "rows of features take more than" in refusal(**many)


FEATURES = {
    "keys": torch.arange(24.0).reshape(2, 3, 4),
    "mask": torch.tensor([[True, False], [False, True]]),
    "half": torch.tensor([[1.5, -2.25], [0.1, 3e38]], dtype=torch.bfloat16),
    "ids": torch.tensor([[1 << 40], [-5]]),
}


def test_features_cross_bit_for_bit() -> None:
    said = unpack(
        pack(
            {
                "features": as_arrays(FEATURES),
                "described": json.loads(json.dumps(description(FEATURES))),
            }
        )
    )
    found = read_features(said["features"], read_description(said["described"]), 2)
    assert found.keys() == FEATURES.keys()
    for name, value in FEATURES.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value)


SAID = as_arrays(FEATURES)
WRONG = [
    (None, "NoneType"),
    ({}, "without entries"),
    (SAID | {"more": np.zeros(2)}, "more"),
    (
        SAID | {"keys": np.zeros((2, 3, 4))},
        r"feature keys is float64 \[2, 3, 4\]: float32 \[2, 3, 4\]",
    ),
    (SAID | {"keys": np.zeros((1, 3, 4), np.float32)}, r"float32 \[1, 3, 4\]"),
    (SAID | {"keys": [1.0]}, "list"),
    (
        SAID | {"keys": np.full((2, 3, 4), np.nan, np.float32)},
        "feature keys holds a number that is not finite",
    ),
    (
        SAID | {"half": np.full((2, 2), 0x7F80, np.int16)},
        "feature half holds a number that is not finite",
    ),
]


@pytest.mark.parametrize(("said", "complaint"), WRONG)
def test_other_features_are_refused(said: Any, complaint: str) -> None:
    with pytest.raises(MessageError, match=complaint):
        read_features(said, read_description(description(FEATURES)), 2)


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
anything = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
)
one = st.fixed_dictionaries({"dtype": st.sampled_from(["float32", "bool", "O"]), "shape": anything})
shaped = st.dictionaries(st.text(max_size=4), one)


@given(anything | shaped)
def test_any_description_is_read_or_refused(said: Any) -> None:
    try:
        found = read_description(said)
    except MessageError:
        return
    assert found and all(each.nbytes >= 0 for each in found.values())


def test_adapters_that_change_nothing_do_not_count() -> None:
    weight = {"w": fingerprint("w", torch.ones(2))}
    idle = fingerprint("x.lora_B.default.weight", torch.zeros(2, 2))
    fresh = weight | {
        "x.lora_A.default.weight": fingerprint("x.lora_A.default.weight", torch.ones(2)),
        "x.lora_B.default.weight": idle,
    }
    assert combined(fresh) == combined(weight)
    used = fresh | {
        "x.lora_B.default.weight": fingerprint("x.lora_B.default.weight", torch.ones(2, 2))
    }
    assert combined(used) != combined(weight) and combined(
        {"w": fingerprint("w", torch.zeros(2))}
    ) != combined(weight)

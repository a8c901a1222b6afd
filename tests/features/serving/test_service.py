"""Requests and the policy's actions: the same bits as locally, and one line for what is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.config.errors import Failure, UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.images import padded
from rlinf_vla.core.protocols import Convention, PolicySpec
from rlinf_vla.core.types import Episodes, Observation
from rlinf_vla.features.serving.array_messages import MessageError
from rlinf_vla.features.serving.observations import (
    NATIVE,
    PRESETS,
    SGLANG,
    VLA_EVAL,
    Defaults,
    Keys,
    Request,
    chosen,
    flat,
    read_request,
)
from rlinf_vla.features.serving.service import Answer, PolicyService, opened
from rlinf_vla.rollout.actor import Actor, Settings
from tests.features.serving.conftest import an_image, native

SPEC = PolicySpec(chunk=3, action_dim=4, state_dim=2, images={"base": (64, 64)})
DEFAULTS = Defaults(temperature=0.5, run_seed=7, most_rows=4)


def read(message: Any, keys: Keys = NATIVE, spec: PolicySpec = SPEC) -> Request:
    return read_request(flat(message), keys, spec, DEFAULTS, seed=11, step=5)


def answers(service: PolicyService, *messages: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    requests = [service.request(message, NATIVE, seed, 0) for seed, message in enumerate(messages)]
    found = service.answer(requests)
    for outcome in found:
        assert isinstance(outcome, Answer), outcome
    return [outcome.actions for outcome in found if isinstance(outcome, Answer)]


def test_a_keyed_batch_has_the_bits_of_a_local_rollout(recipe: Recipe) -> None:
    rows = 3
    images = np.stack([an_image(seed) for seed in range(rows)])
    episode = {
        "task": np.array([1, 0, 1]),
        "seed": np.array([4, 5, 2**32 - 1]),
        "attempt": np.array([0, 2, 1]),
    }
    step = np.array([0, 3, 6])
    message = {
        "images": {"base": images},
        "instruction": ["push"] * rows,
        "episode": episode,
        "step": step,
        "temperature": 1.0,
    }
    with opened(recipe) as service:
        (found,) = answers(service, message | {"run_seed": 99})
        (other,) = answers(service, message)
        actor = Actor(service.policy, Settings(99, 1.0, 8, False))
        episodes = Episodes(
            *(torch.from_numpy(episode[name]) for name in ("task", "seed", "attempt"))
        )
        inputs = actor.prepare(
            Observation({"base": torch.from_numpy(images)}, torch.zeros(rows, 0), ["push"] * rows)
        )
        wanted = actor.act(inputs, episodes, torch.from_numpy(step)).actions
    assert found.dtype == np.float32 and found.shape == (rows, 3, 4)
    assert np.array_equal(found, wanted.numpy())
    assert not np.array_equal(found, other), "the recipe's own seed is another one"


def test_joined_requests_get_their_own_rows(recipe: Recipe) -> None:
    messages = [native(seed, temperature=1.0) for seed in range(4)] + [
        native(4),
        native(5, temperature=1.0, step=1, episode={"seed": 8}),
    ]
    with opened(recipe) as service:
        together = answers(service, *messages)
        requests = [
            service.request(message, NATIVE, seed, 0) for seed, message in enumerate(messages)
        ]
        alone = [service.answer([request])[0] for request in requests]
    for found, outcome in zip(together, alone, strict=True):
        assert isinstance(outcome, Answer) and found.shape == (3, 4)
        assert np.array_equal(found, outcome.actions)
    assert requests[5].alone and not requests[0].alone


def test_a_bad_instruction_reaches_no_other_client(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(recipe) as service:
        prepare = service.policy.prepare

        def refusing(obs: Observation) -> Any:
            if "long" in obs.instruction[0]:
                raise UserError("instruction 'long' takes 99 tokens")
            if "crash" in obs.instruction[0]:
                raise RuntimeError("crash")
            return prepare(obs)

        monkeypatch.setattr(service.policy, "prepare", refusing)
        requests = [
            service.request(native(0) | {"instruction": text}, NATIVE, 0, 0)
            for text in ("ok", "long", "crash", "fine")
        ]
        first, long, crash, last = service.answer(requests)
    assert (
        isinstance(first, Answer)
        and isinstance(last, Answer)
        and np.array_equal(first.actions, last.actions)
    )
    assert isinstance(long, MessageError) and "99 tokens" in str(long)
    assert isinstance(crash, RuntimeError)


def test_actions_that_are_not_finite_are_never_sent(recipe: Recipe) -> None:
    with opened(recipe) as service:
        service.policy.centres.fill_(float("nan"))  # type: ignore[operator]
        (outcome,) = service.answer([service.request(native(), NATIVE, 0, 0)])
    assert isinstance(outcome, Failure) and "finite" in str(outcome)


def test_committed_actions_need_a_policy_that_continues_them(recipe: Recipe) -> None:
    with (
        opened(recipe) as service,
        pytest.raises(MessageError, match="cannot continue committed actions"),
    ):
        service.request(native(committed=np.zeros((1, 2, 4), np.float32)), NATIVE, 0, 0)


def test_a_policy_that_sees_distances_is_not_served(recipe: Recipe) -> None:
    with opened(recipe) as service:
        service.policy.spec = replace(SPEC, images={"base_depth": (64, 64)})
        with pytest.raises(UserError, match="'base_depth' shows distances, a client's message has"):
            PolicyService(recipe, service.policy, {})


def test_metadata_names_the_weights_and_no_path(recipe: Recipe) -> None:
    with opened(recipe) as service:
        metadata = service.metadata
    assert metadata["spec"]["images"] == {"base": [64, 64]} and metadata["spec"]["chunk"] == 3
    assert len(metadata["policy"]["sha256"]) == 64 and metadata["policy"]["name"] == "model"
    assert "/" not in str(metadata), "no path of this machine"


def test_actors_of_many_temperatures_are_not_kept(recipe: Recipe) -> None:
    with opened(recipe) as service:
        for number in range(40):
            answers(service, native(temperature=1 + number / 100))
        assert len(service.kept) == 8


def test_a_recipe_without_a_model_is_refused(recipe: Recipe) -> None:
    recipe.model.name = "none"
    with pytest.raises(UserError, match="has no model to serve"), opened(recipe):
        pass


def test_presets_read_openpis_examples() -> None:
    libero = {
        "observation/image": an_image(0, (30, 40)),
        "observation/wrist_image": an_image(1),
        "observation/state": np.arange(8, dtype=np.float64),
        "prompt": "stack",
    }
    spec = replace(SPEC, state_dim=8, images={"base": (64, 64), "wrist": (64, 64)})
    request = read(libero, PRESETS["libero"], spec)
    image = torch.from_numpy(libero["observation/image"])[None]
    assert torch.equal(request.observation.images["base"], padded(image, (64, 64)))
    assert request.observation.images["base"][0, 0].max() == 0, "a black bar"
    assert torch.equal(
        request.observation.images["wrist"][0], torch.from_numpy(libero["observation/wrist_image"])
    )
    assert request.observation.state.tolist() == [
        list(range(8))
    ] and request.observation.instruction == ["stack"]
    droid = {
        "observation/exterior_image_1_left": an_image(0),
        "observation/wrist_image_left": an_image(1),
        "observation/joint_position": np.arange(7.0),
        "observation/gripper_position": np.array([7.0]),
        "prompt": "stack",
    }
    assert read(droid, PRESETS["droid"], spec).observation.state.tolist() == [list(range(8))]
    sglang = {
        "observation.images.base": an_image(0),
        "observation.state": [0.0, 1.0],
        "task": "stack",
    }
    assert read(sglang, SGLANG).observation.state.tolist() == [[0, 1]]
    vla_eval = {
        "images": {"agentview": an_image(0)},
        "states": [0, 1],
        "task_description": "stack",
        "controller_states": [1],
    }
    assert read(vla_eval, VLA_EVAL).observation.instruction == ["stack"]


def test_defaults_of_a_request() -> None:
    request = read(native(state=[0, 1]))
    assert (request.temperature, request.run_seed, request.single, request.alone) == (
        0.5,
        7,
        True,
        False,
    )
    assert (request.episodes.seed.tolist(), request.step.tolist()) == ([11], [5])
    batch = {
        "images": {"base": np.zeros((2, 64, 80, 3), np.uint8)},
        "state": np.zeros((2, 2)),
        "instruction": "push",
    }
    request = read(batch)
    assert (request.rows, request.single, request.alone) == (2, False, True)
    assert request.observation.images["base"].shape == (2, 64, 80, 3), (
        "the policy resizes it, as in eval"
    )
    assert request.episodes.attempt.tolist() == [0, 1], "rows get noise of their own"


BAD = {
    "no map": (5, "a map is expected"),
    "no image": ({"state": [0, 1], "instruction": "x"}, "images.base is missing"),
    "float image": (native(state=[0, 1], images={"base": np.zeros((64, 64, 3))}), "uint8"),
    "grey": (
        native(state=[0, 1], images={"base": np.zeros((64, 64), np.uint8)}),
        "uint8 [H, W, 3]",
    ),
    "small": (
        native(state=[0, 1], images={"base": np.zeros((64, 63, 3), np.uint8)}),
        "64x63 pixels",
    ),
    "empty": (native(state=[0, 1], images={"base": np.zeros((0, 64, 64, 3), np.uint8)}), "empty"),
    "many rows": (
        native(state=[0, 1], images={"base": np.zeros((5, 64, 64, 3), np.uint8)}),
        "at most 4",
    ),
    "no state": (native(), "state"),
    "short state": (native(state=[0]), "needs 2"),
    "long state": (native(state=[0, 1, 2]), "needs 2"),
    "text state": (native(state="a"), "numbers"),
    "state of rows": (native(state=np.zeros((2, 2))), "1 row(s) of numbers"),
    "state as a column": (native(state=np.zeros((2, 1))), "1 row(s) of numbers"),
    "state in another order": (
        native(state=np.zeros((2, 3)), images={"base": np.zeros((3, 64, 64, 3), np.uint8)}),
        "3 row(s) of numbers",
    ),
    "state of texts": (native(state=["0", "1"]), "numbers"),
    "state of truths": (native(state=np.zeros(2, bool)), "numbers"),
    "ragged state": (native(state=[[0], [0, 1]]), "numbers"),
    "channels first": (
        native(state=[0, 1], images={"base": np.zeros((3, 64, 64), np.uint8)}),
        "uint8 [H, W, 3]",
    ),
    "four channels": (
        native(state=[0, 1], images={"base": np.zeros((64, 64, 4), np.uint8)}),
        "uint8 [H, W, 3]",
    ),
    "array for images": (native(state=[0, 1], images=np.zeros(3)), "images.base is missing"),
    "array for a text": (
        native(state=[0, 1], instruction=np.zeros(2)),
        "instruction is float64 [2]",
    ),
    "half a character": (native(state=[0, 1], instruction="\ud800"), "the instruction is"),
    "committed texts": (native(state=[0, 1], committed=[[["0"] * 4]]), "committed"),
    "nan": (native(state=[0, float("nan")]), "finite"),
    "overflow": (native(state=[0, 1e300]), "finite"),
    "no text": (native(state=[0, 1], instruction=None), "instruction is missing"),
    "long text": (native(state=[0, 1], instruction="a" * 1001), "1000 characters"),
    "texts": (native(state=[0, 1], instruction=["a", "b"]), "one for each row"),
    "temperature": (native(state=[0, 1], temperature=-1.0), "temperature"),
    "temperature nan": (native(state=[0, 1], temperature=float("nan")), "temperature"),
    "temperature bool": (native(state=[0, 1], temperature=True), "temperature"),
    "run seed": (native(state=[0, 1], run_seed=0.5), "run_seed"),
    "seed": (native(state=[0, 1], episode={"seed": -1}), "episode.seed"),
    "big seed": (native(state=[0, 1], episode={"seed": 2**70}), "episode.seed"),
    "seeds": (native(state=[0, 1], episode={"seed": [1, 2]}), "episode.seed"),
    "ragged": (native(state=[0, 1], episode={"seed": [[1], [1, 2]]}), "episode.seed"),
    "step": (native(state=[0, 1], episode={"seed": 1}, step="a"), "step"),
    "committed": (native(state=[0, 1], committed=np.zeros((1, 9, 4))), "committed"),
    "frozen": (native(state=[0, 1], committed=np.zeros((1, 2, 4)), frozen=3), "frozen"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_refused_in_one_line(name: str) -> None:
    message, reason = BAD[name]
    with pytest.raises(MessageError) as caught:
        read(message)
    assert (
        reason in str(caught.value)
        and "\n" not in str(caught.value)
        and len(str(caught.value)) < 200
    )


def test_an_extremely_narrow_image_is_not_resized() -> None:
    for shape in ((1, 4000), (1, 99), (99, 1), (1, 65), (65, 1), (2, 180)):
        message = {
            "observation/image": np.zeros((*shape, 3), np.uint8),
            "observation/state": [0, 1],
            "prompt": "x",
        }
        for spec in (SPEC, replace(SPEC, bars=0.5)):
            with pytest.raises(MessageError, match="too narrow"):
                read(message, PRESETS["libero"], spec)


def test_a_policy_with_bars_gets_an_image_of_any_size_as_it_is() -> None:
    """It makes the bars itself, as in eval, and not by openpi's rule."""
    image = np.arange(20 * 30 * 3, dtype=np.uint8).reshape(20, 30, 3)
    bars = replace(SPEC, bars=1.0)
    message = {"state": [0.0, 1.0], "instruction": "x", "images": {"base": image}}
    libero = {"observation/image": image, "observation/state": [0.0, 1.0], "prompt": "x"}
    for found in (read(message, spec=bars), read(libero, PRESETS["libero"], bars)):
        assert torch.equal(found.observation.images["base"], torch.from_numpy(image)[None])
    assert read(libero, PRESETS["libero"]).observation.images["base"].shape == (1, 64, 64, 3)
    with pytest.raises(MessageError, match="the policy needs 64x64 or more"):
        read(message)


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers() | st.lists(st.floats()), max_size=3),
) | st.sampled_from(
    [
        an_image(0),
        np.zeros(2),
        np.zeros((2, 2)),
        np.float32(1),
        np.array([True]),
        np.uint64(2**64 - 1),
    ]
)
keys = ["images", "state", "instruction", "temperature", "run_seed", "step", "committed", "frozen"]


@given(
    st.dictionaries(st.sampled_from(keys), values),
    st.dictionaries(st.sampled_from(["seed", "task", "attempt"]), values),
)
def test_any_message_is_a_request_or_refused(
    changes: dict[str, Any], episode: dict[str, Any]
) -> None:
    try:
        request = read(native(state=[0, 1]) | changes | {"episode": episode})
    except MessageError as error:
        assert "\n" not in str(error)
    else:
        assert request.rows == 1 and bool(request.observation.state.isfinite().all())


def test_the_recipes_keys(recipe: Recipe) -> None:
    two = replace(SPEC, images={"base": (64, 64), "side": (64, 64)})
    recipe.serve.observation = "libero"
    with pytest.raises(UserError, match=r"image 'side'.*\+serve.images.side=KEY"):
        chosen(recipe.serve, two)
    recipe.serve.images = {"side": "observation/left"}
    recipe.serve.state = ["a", "b"]
    keys = chosen(recipe.serve, two)
    assert (
        keys.images["side"] == "observation/left"
        and keys.images["base"] == "observation/image"
        and keys.state == ("a", "b")
    )
    with pytest.raises(UserError, match=r"serve\.images names side"):
        chosen(recipe.serve, SPEC)


@pytest.mark.parametrize(
    ("part", "value"),
    [("images", "upright"), ("state", "quaternion"), ("gripper", "open_positive")],
)
def test_a_policy_of_another_convention_is_refused(recipe: Recipe, part: str, value: str) -> None:
    recipe.serve.observation = "libero"
    known = {"images": "rot180", "state": "axis_angle", "gripper": "close_positive"}
    chosen(recipe.serve, replace(SPEC, convention=Convention(**known)))
    with pytest.raises(UserError, match=f"the policy has {part} as {value}"):
        chosen(recipe.serve, replace(SPEC, convention=Convention(**known | {part: value})))

"""Policies on servers of other projects: a stand-in speaks openpi's wire."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.config.checks import NO_MODEL
from rlinf_vla.config.errors import Failure, UserError
from rlinf_vla.core.images import padded
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import Observation
from rlinf_vla.features.serving import policy_server
from rlinf_vla.features.serving.policy_server import Connection
from rlinf_vla.models.cards import LIBERO_CONVENTION
from rlinf_vla.models.remote.options import RemoteOptions
from rlinf_vla.models.remote.policy import RemotePolicy
from rlinf_vla.testing.policy_calls import act, observations
from tests.models.policy_servers import PolicyServer, deaf, packed, serving
from tests.skips import needs

pytestmark = needs("serve")

HORIZON = 10


def chunk_of(observation: dict[str, Any], dimensions: int = 7) -> dict[str, Any]:
    """Actions that depend on all that a policy reads."""
    found = np.arange(HORIZON * dimensions, dtype=np.float32).reshape(HORIZON, dimensions) / 100
    for value in observation.values():
        found = found + np.float32(
            value.mean() if isinstance(value, np.ndarray) else len(str(value))
        )
    return {
        "actions": found,
        "policy_timing": {"infer_ms": 3.0},
        "server_timing": {"infer_ms": 4.0},
    }


def remote(url: str, **options: Any) -> RemotePolicy:
    chosen = RemoteOptions(
        url=url, **{"keys": "libero", "chunk": 5, "timeout_s": 60.0, "retries": 0} | options
    )
    return RemotePolicy.load(Path(NO_MODEL), chosen)


def test_libero_gets_the_keys_of_openpis_example() -> None:
    server = PolicyServer(chunk_of)
    with serving(server) as url:
        policy = remote(url)
        assert policy.spec.images == {"base": (224, 224), "wrist": (224, 224)}
        assert (policy.spec.chunk, policy.spec.action_dim, policy.spec.state_dim) == (5, 7, 8)
        assert policy.spec.convention == LIBERO_CONVENTION and policy.spec.env == {
            "convention": "openvla",
            "cameras": ["base", "wrist"],
        }
        seen = large(policy, 2)
        sample = act(policy, policy.prepare(seen))
    assert [set(each) for each in server.seen] == [
        {"observation/image", "observation/wrist_image", "observation/state", "prompt"},
    ] * 2
    row = next(each for each in server.seen if each["prompt"] == seen.instruction[1])
    assert np.array_equal(
        row["observation/wrist_image"], padded(seen.images["wrist"], (224, 224))[1].numpy()
    )
    assert row["observation/state"].dtype == np.float32 and np.array_equal(
        row["observation/state"], seen.state[1].numpy()
    )
    assert torch.equal(sample.actions[1], torch.from_numpy(chunk_of(row)["actions"][:5]))
    assert sample.log_prob.isnan().all() and sample.value.isnan().all(), (
        "a server does not tell them"
    )


def large(policy: Policy, batch: int) -> Observation:
    """An observation whose images are larger than the policy's, and not square."""
    found = observations(policy, batch)
    return replace(
        found,
        images={
            name: torch.randint(0, 256, (batch, 300, 256, 3), dtype=torch.uint8)
            for name in found.images
        },
    )


def test_droid_gets_joints_and_gripper_apart() -> None:
    server = PolicyServer(lambda observation: chunk_of(observation, 8))
    with serving(server) as url:
        policy = remote(url, keys="droid")
        seen = observations(policy, 1)
        assert act(policy, policy.prepare(seen)).actions.shape == (1, 5, 8)
    (row,) = server.seen
    assert np.array_equal(row["observation/joint_position"], seen.state[0, :7].numpy())
    assert np.array_equal(row["observation/gripper_position"], seen.state[0, 7:].numpy())
    assert set(row) >= {"observation/exterior_image_1_left", "observation/wrist_image_left"}


def test_sglang_is_known_by_its_path() -> None:
    server = PolicyServer(chunk_of)
    with serving(server) as url:
        policy = remote(
            f"{url}/openpi/policy",
            keys=None,
            images={"front": "observation.images.cam"},
            action_dim=7,
            state_dim=3,
        )
        act(policy, policy.prepare(observations(policy, 1)))
    assert set(server.seen[0]) == {"observation.images.cam", "observation.state", "task"} and set(
        server.paths
    ) == {"/openpi/policy"}


def test_vllm_omni_gets_a_seed_that_belongs_to_the_row() -> None:
    server = PolicyServer(lambda observation: chunk_of(observation)["actions"])
    with serving(server) as url:
        policy = remote(f"{url}/v1/realtime/robot/openpi", connections=1)
        inputs = policy.prepare(observations(policy, 3))
        first = act(policy, inputs)
        act(policy, inputs)
        act(policy, inputs, temperature=0.0)
    assert first.actions.shape == (3, 5, 7), "a bare array"
    seeds = [each.get("seed") for each in server.seen]
    assert len(set(seeds[:3])) == 3 and seeds == seeds[:3] * 3, (
        "greedily, too: a flow starts from noise"
    )
    assert all(each["endpoint"] == "infer" for each in server.seen)


@pytest.mark.parametrize("connections", [1, 2, 8])
def test_rows_keep_their_order_over_any_number_of_connections(connections: int) -> None:
    server = PolicyServer(chunk_of)
    with serving(server) as url:
        policy = remote(url, connections=connections)
        inputs = policy.prepare(observations(policy, 5))
        alone = [
            act(policy, {name: value[row : row + 1] for name, value in inputs.items()}).actions
            for row in range(5)
        ]
        assert (
            torch.equal(act(policy, inputs).actions, torch.cat(alone))
            and len(torch.cat(alone)[:, 0, 0].unique()) == 5
        )
    assert server.connections == 1 + min(connections, 5), (
        "one for the metadata, and those of the rows"
    )


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"\xc1 garbage", "sends what cannot be read"),
        (
            "Traceback (most recent call last):\n  File x\nValueError: no such \x1b[2Jkey",
            r"refuses: ValueError: no such \\x1b\[2Jkey",
        ),
        ({"actions": np.zeros((10, 6), np.float32)}, "shape 10x6, 5x7 or a longer chunk is needed"),
        ({"actions": np.zeros((4, 7), np.float32)}, "shape 4x7"),
        ({"actions": np.zeros((1, 10, 7), np.float32)}, "shape 1x10x7"),
        ({"actions": np.zeros((10, 7), np.int64)}, "dtype int64"),
        ({"actions": [[0.0] * 7] * 10}, "actions as list"),
        ({"actions": np.full((10, 7), np.nan, np.float32)}, "not a finite number"),
        ({"actions": np.full((10, 7), 1e300)}, "not a finite number"),
        ({"type": "error", "message": "out of memory"}, "refuses: out of memory"),
        ({"status": "reset successful"}, "sends no actions, but status"),
        ({}, "sends no actions, but an empty map"),
    ],
)
def test_an_answer_that_is_none(answer: Any, complaint: str) -> None:
    server = PolicyServer(lambda observation: answer)
    with serving(server) as url:
        policy = remote(url, retries=3)
        with pytest.raises(Failure, match=complaint) as raised:
            act(policy, policy.prepare(observations(policy, 1)))
    assert "\n" not in str(raised.value) and url in str(raised.value) and len(server.seen) == 1, (
        "it is not asked again"
    )


def test_an_array_of_objects_is_not_decoded() -> None:
    frame = packed(
        {"actions": {b"__ndarray__": True, b"data": b"x" * 8, b"dtype": "|O", b"shape": [1]}}
    )
    with serving(PolicyServer(lambda observation: frame)) as url:
        policy = remote(url)
        with pytest.raises(Failure, match=r"dtype '\|O'"):
            act(policy, policy.prepare(observations(policy, 1)))


def dropping(times: int) -> Callable[[dict[str, Any]], Any]:
    """Close the connection instead of an answer, so often."""
    left = [times]

    def answer(observation: dict[str, Any]) -> Any:
        left[0] -= 1
        return None if left[0] >= 0 else chunk_of(observation)

    return answer


def test_a_lost_connection_is_made_again_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_vla.features.serving.policy_server.FIRST_PAUSE_S", 0.0)
    server = PolicyServer(dropping(2))
    with serving(server) as url:
        policy = remote(url, retries=2, connections=1)
        inputs = policy.prepare(observations(policy, 3))
        assert torch.equal(act(policy, inputs).actions, act(policy, inputs).actions)
        server.answer = dropping(3)
        with pytest.raises(
            Failure, match="does not answer in 3 attempts: the connection was closed"
        ):
            act(policy, inputs)
        assert act(policy, inputs).actions.isfinite().all(), "the next call connects again"


def test_a_control_loop_waits_for_no_second_attempt() -> None:
    server = PolicyServer(dropping(1))
    with serving(server) as url:
        policy = remote(url, retries=5)
        policy.begin_control()
        inputs = policy.prepare(observations(policy, 1))
        with pytest.raises(Failure, match="does not answer: the connection was closed"):
            act(policy, inputs)
        assert len(server.seen) == 1


def test_a_control_loop_gives_up_a_silent_connection_soon_once_it_has_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not before: the server may have to compile."""
    limit = Connection.limit
    limits = list[float]()
    silent, goes_on = threading.Event(), threading.Event()

    def shorter(connection: Connection, seconds: float) -> None:
        """Without a limit for the attempt to connect."""
        limits.append(seconds)
        limit(connection, 0.05)

    def answer(observation: dict[str, Any]) -> Any:
        (goes_on if silent.is_set() else threading.Event()).wait(60 if silent.is_set() else 0.2)
        return chunk_of(observation)

    monkeypatch.setattr(Connection, "limit", shorter)
    monkeypatch.setattr(policy_server, "CONTROL_S", 50.0)

    with serving(PolicyServer(answer)) as url:
        policy = remote(url)
        policy.begin_control()
        inputs = policy.prepare(observations(policy, 1))
        assert act(policy, inputs).actions.isfinite().all()
        silent.set()
        with pytest.raises(Failure, match=r"does not answer: no answer within 0\.05 s$"):
            act(policy, inputs)
        silent.clear()
        goes_on.set()
        assert act(policy, inputs).actions.isfinite().all()
    assert limits == [50.0, 50.0]


def test_a_control_loop_survives_a_server_that_wants_a_token_now() -> None:
    wanted = threading.Event()

    def deny(connection: Any, request: Any) -> Any:
        return connection.respond(401, "no") if wanted.is_set() else None

    with serving(PolicyServer(chunk_of), process_request=deny) as url:
        policy = remote(url)
        policy.begin_control()
        wanted.set()
        with pytest.raises(Failure, match="wants a token"):
            act(policy, policy.prepare(observations(policy, 1)))


def test_a_connection_that_was_closed_meanwhile_is_no_failure() -> None:
    """A server closes idle connections."""
    server = PolicyServer(chunk_of)
    with serving(server) as url:
        policy = remote(url)
        inputs = policy.prepare(observations(policy, 1))

        def last(observation: dict[str, Any]) -> Any:
            server.answer = chunk_of
            return chunk_of(observation)

        server.answer = last
        first = act(policy, inputs)
        policy.server.close()
        assert torch.equal(act(policy, inputs).actions, first.actions)


def test_a_late_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to connect is not part of it."""
    asked = threading.Event()
    send = Connection.send
    ahead = [0.0]

    def soon_due(connection: Connection, message: Any) -> None:
        send(connection, message)
        ahead.append(59.9)

    with serving(
        PolicyServer(lambda observation: (asked.wait(60), chunk_of(observation))[1])
    ) as url:
        policy = remote(url, timeout_s=60.0)
        monkeypatch.setattr(
            policy_server, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[-1])
        )
        monkeypatch.setattr(Connection, "send", soon_due)
        with pytest.raises(Failure, match=r"no answer within 60 s \(model\.options\.timeout_s\)"):
            act(policy, policy.prepare(observations(policy, 1)))
        asked.set()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            {"keys": None},
            "does not describe its policy.*model.options.keys=libero, droid or lerobot",
        ),
        ({"chunk": None}, "set model.options.chunk"),
        ({"keys": "lerobot"}, "set model.options.action_dim"),
        ({"keys": "lerobot", "action_dim": 7}, "set model.options.state_dim"),
        ({"state_dim": 7}, "state of 8 numbers"),
        (
            {"token_env": "NOT_SET_ANYWHERE"},
            "token_env=NOT_SET_ANYWHERE: set this environment variable",
        ),
        ({"ca_file": "/x.pem"}, "ca_file=/x.pem is for wss://"),
    ],
)
def test_what_is_missing_is_named(options: dict[str, Any], complaint: str) -> None:
    with (
        serving(PolicyServer(chunk_of)) as url,
        pytest.raises(UserError, match=complaint) as raised,
    ):
        remote(url, **options)
    assert "\n" not in str(raised.value)


def test_no_server_and_no_address() -> None:
    with pytest.raises(
        UserError, match=r"model\.options\.url=ws://127\.0\.0\.1:1: .*start the server first"
    ):
        remote("ws://127.0.0.1:1")
    with pytest.raises(UserError, match=r"model\.options\.url has no value"):
        RemotePolicy.load(Path(NO_MODEL), RemoteOptions())


@pytest.mark.parametrize("metadata", ["welcome", b"\x93\x01\x02\x03", b"\xff\xff"])
def test_what_speaks_but_is_no_policy_server(metadata: Any) -> None:
    with (
        serving(PolicyServer(chunk_of, metadata)) as url,
        pytest.raises(UserError, match=r"model\.options\.url=") as raised,
    ):
        remote(url)
    assert "\n" not in str(raised.value)


def test_the_token_travels_and_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLICY_TOKEN", "s3cret")
    server = PolicyServer(chunk_of)
    with serving(server) as url:
        policy = remote(url, token_env="POLICY_TOKEN")
        act(policy, policy.prepare(observations(policy, 1)))
    assert [each["Authorization"] for each in server.headers] == ["Bearer s3cret"] * 2
    assert "s3cret" not in repr(policy.server) + repr(policy.spec)


def test_a_server_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to connect is not part of the limit."""
    connect = Connection.__init__

    def connected(connection: Connection, *arguments: Any) -> None:
        connect(connection, *arguments)
        connection.limit(0.2)

    monkeypatch.setattr(Connection, "__init__", connected)
    with deaf({}) as url:
        policy = remote(url, image_size=1024)
        with pytest.raises(Failure, match="does not answer: the connection was closed"):
            act(policy, policy.prepare(observations(policy, 1)))


numbers = st.sampled_from(
    [np.float32, np.float64, np.float16, np.int64, np.uint8, np.bool_]
).flatmap(
    lambda dtype: st.lists(st.integers(0, 10), max_size=3).map(lambda shape: np.ones(shape, dtype))
)
answers = st.binary(max_size=40) | st.recursive(
    st.none()
    | st.integers(-9, 9)
    | st.floats()
    | st.text(max_size=5)
    | numbers
    | st.just(np.ones((6, 7))),
    lambda each: (
        st.lists(each, max_size=2)
        | st.dictionaries(st.sampled_from(["actions", "error", "type", "x"]), each, max_size=3)
    ),
    max_leaves=4,
)


def test_whatever_a_server_answers_is_actions_or_one_line() -> None:
    server = PolicyServer(lambda observation: None)
    with serving(server) as url:
        policy = remote(url, image_size=16)
        inputs = policy.prepare(observations(policy, 1))

        @given(answers)
        def check(reply: Any) -> None:
            server.answer = lambda observation: reply
            try:
                found = act(policy, inputs).actions
            except Failure as error:
                assert str(error).count("\n") == 0 and url in str(error)
            else:
                assert found.shape == (1, 5, 7) and found.isfinite().all()

        check()

"""Policies on servers of our own, as a stand-in that may misbehave; tests/cli/test_remote.py has the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.config.checks import NO_MODEL
from rlinf_vla.config.errors import Failure, UserError
from rlinf_vla.core.protocols import Convention, RealTimeChunking, ToolUnits
from rlinf_vla.models.remote.description import spec_of
from rlinf_vla.models.remote.options import RemoteOptions
from rlinf_vla.models.remote.policy import RemotePolicy
from rlinf_vla.rollout.noise import CounterNoise
from rlinf_vla.testing.policy_calls import act, observations
from tests.models.policy_servers import PolicyServer, serving
from tests.skips import needs

pytestmark = needs("serve")

SPEC: dict[str, Any] = {
    "chunk": 4,
    "action_dim": 7,
    "state_dim": 8,
    "images": {"base": [16, 24], "wrist": [16, 16]},
    "convention": {
        "tool": {"translation_m": 0.05, "rotation_rad": 0.5},
        "gripper": "close_positive",
        "state": "axis_angle",
        "images": "rot180",
        "jpeg": True,
    },
    "env": {"convention": "openvla", "python": "/bin/evil", "cameras": ["front"]},
    "remarks": ["assumed: \x1b[2J nothing"],
}
OURS: dict[str, Any] = {
    "spec": SPEC,
    "policy": {"model": "pi0", "sha256": "12ab", "device": "cpu"},
    "max_batch_size": 3,
    "real_time_chunking": False,
}


def answer(message: dict[str, Any]) -> dict[str, Any]:
    rows = len(message["instruction"])
    return {"actions": np.arange(rows * 4 * 7, dtype=np.float32).reshape(rows, 4, 7)}


def metadata(**changed: Any) -> dict[str, Any]:
    return {"rlinf_vla": OURS | changed}


def remote(url: str, **options: Any) -> RemotePolicy:
    return RemotePolicy.load(
        Path(NO_MODEL), RemoteOptions(url=url, **{"timeout_s": 60.0, "retries": 0} | options)
    )


def test_the_spec_is_the_servers_as_far_as_a_server_may_say() -> None:
    spec, chunk = spec_of(SPEC, RemoteOptions(chunk=2))
    assert (spec.chunk, chunk, spec.action_dim, spec.state_dim) == (2, 4, 7, 8) and spec.images == {
        "base": (16, 24),
        "wrist": (16, 16),
    }
    assert spec.convention == Convention(
        ToolUnits(0.05, 0.5), "close_positive", "axis_angle", "rot180"
    ), "the server passes images through JPEG"
    assert spec.env == {"convention": "openvla", "cameras": ["base", "wrist"]}, (
        "no program, and the cameras of its images"
    )
    assert spec.remarks == (r"assumed: \x1b[2J nothing",)


def test_one_request_per_call_with_the_keys_of_its_noise() -> None:
    server = PolicyServer(answer, metadata())
    with serving(server) as url:
        policy = remote(url)
        seen = observations(policy, 3)
        inputs = policy.prepare(seen)
        noise = CounterNoise(
            5,
            torch.tensor([1, 2 + 3 * 65536, 4]),
            torch.tensor([7, 8, 2**32 - 1]),
            torch.tensor([0, 10, 20]),
        )
        sample = policy.act(policy.encode(inputs), noise, 0.7)
        policy.act(policy.encode(inputs), None, 0.0)
    assert (
        torch.equal(sample.actions, torch.from_numpy(answer({"instruction": "abc"})["actions"]))
        and server.connections == 2
    )
    keyed, greedy = server.seen
    assert (
        keyed["instruction"] == seen.instruction
        and keyed["temperature"] == 0.7
        and keyed["run_seed"] == 5
    )
    assert all(
        np.array_equal(keyed["images"][name], seen.images[name].numpy())
        for name in ("base", "wrist")
    )
    assert np.array_equal(keyed["state"], seen.state.numpy())
    assert {name: value.tolist() for name, value in keyed["episode"].items()} == {
        "task": [1, 2, 4],
        "seed": [7, 8, 2**32 - 1],
        "attempt": [0, 3, 0],
    }
    assert keyed["step"].tolist() == [0, 10, 20]
    assert greedy["temperature"] == 0.0 and not {"episode", "step", "run_seed"} & greedy.keys()


def test_committed_actions_travel_if_the_policy_continues_them() -> None:
    server = PolicyServer(answer, metadata(real_time_chunking=True))
    with serving(server) as url:
        policy = remote(url)
        assert isinstance(policy, RealTimeChunking)
        committed = torch.rand(1, 2, 7)
        policy.act_with_prefix(policy.prepare(observations(policy, 1)), None, 0.0, committed, 1)
    assert (
        np.array_equal(server.seen[0]["committed"], committed.numpy())
        and server.seen[0]["frozen"] == 1
    )
    with serving(PolicyServer(answer, metadata())) as url:
        assert not isinstance(remote(url), RealTimeChunking)


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        ({"actions": np.zeros((2, 3, 7), np.float32)}, "shape 2x3x7, 2x4x7"),
        ({"actions": np.zeros((1, 4, 7), np.float32)}, "shape 1x4x7, 2x4x7"),
        ({"actions": np.zeros((4, 7), np.float32)}, "shape 4x7, 2x4x7"),
        ({"actions": np.full((2, 4, 7), np.inf, np.float32)}, "not a finite number"),
        ({"action": np.zeros((2, 4, 7), np.float32)}, "actions as NoneType"),
        ([1, 2], "actions as NoneType"),
        ("the state has 3 numbers", "refuses: the state has 3 numbers"),
    ],
)
def test_an_answer_that_is_none(reply: Any, complaint: str) -> None:
    with serving(PolicyServer(lambda message: reply, metadata())) as url:
        policy = remote(url)
        with pytest.raises(Failure, match=complaint) as raised:
            act(policy, policy.prepare(observations(policy, 2)))
    assert "\n" not in str(raised.value)


def test_rows_are_not_divided_because_that_changes_the_last_bits() -> None:
    server = PolicyServer(answer, metadata())
    with serving(server) as url:
        policy = remote(url)
        with pytest.raises(
            UserError, match=r"takes 3 rows of a policy call, not 4: set rollout\.batch_size=3"
        ):
            act(policy, policy.prepare(observations(policy, 4)))
    assert server.seen == []


def test_a_server_that_was_replaced() -> None:
    server = PolicyServer(answer, metadata())
    with serving(server) as url:
        policy = remote(url)
        inputs = policy.prepare(observations(policy, 1))
        act(policy, inputs)
        server.metadata = metadata(policy={"model": "pi0", "sha256": "34cd", "device": "cpu"})
        policy.server.close()
        with pytest.raises(Failure, match="now serves another policy"):
            act(policy, inputs)


def test_its_provenance() -> None:
    with serving(PolicyServer(answer, metadata())) as url:
        assert RemotePolicy.provenance(RemoteOptions(url=url)) == {
            "sha256": "12ab",
            "device": "cpu",
            "server": OURS["policy"],
        }
    with serving(PolicyServer(answer)) as url:
        assert RemotePolicy.provenance(RemoteOptions(url=url)) == {"sha256": None, "device": None}


def test_an_instruction_that_is_too_long() -> None:
    with serving(PolicyServer(answer, metadata())) as url:
        policy = remote(url)
    policy.fit_instructions(["a" * 1024, "", "ein Würfel"])
    with pytest.raises(UserError, match="has 1025 bytes, another process gets at most 1024"):
        policy.fit_instructions(["a" * 1025])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"chunk": 5}, "gives 4 actions"), ({"action_dim": 6}, "has 7"), ({"state_dim": 0}, "has 8")],
)
def test_options_that_contradict_the_server(options: dict[str, int], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        spec_of(SPEC, RemoteOptions(url="ws://x", **options))


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.just(np.zeros((2, 2))),
    lambda each: (
        st.lists(each, max_size=3)
        | st.dictionaries(st.text(max_size=8) | st.sampled_from(list(SPEC)), each, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.sampled_from(
        [
            (),
            *((name,) for name in SPEC),
            ("convention", "tool"),
            ("convention", "gripper"),
            ("images", "base"),
        ]
    ),
    anything,
)
def test_whatever_a_server_says_ends_in_a_spec_or_in_one_line(
    path: tuple[str, ...], value: Any
) -> None:
    said: Any = value
    if path:
        said = {**SPEC, "convention": dict(SPEC["convention"]), "images": dict(SPEC["images"])}
        inner = said
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value
    try:
        spec, _ = spec_of(said, RemoteOptions(url="ws://x"))
    except UserError as error:
        assert "describes its policy wrongly" in str(error) and "\n" not in str(error)
    else:
        assert (
            1 <= spec.chunk <= 1024
            and spec.env.keys() <= {"convention", "cameras"}
            and all(map(str.isprintable, spec.remarks))
        )


def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_vla.features.serving.policy_server.FIRST_PAUSE_S", 0.0)
    replies: list[Any] = ["busy: 64 requests are waiting"] * 2
    server = PolicyServer(
        lambda message: replies.pop() if replies else answer(message), metadata(), closing=1013
    )
    with serving(server) as url:
        policy = remote(url, retries=2)
        inputs = policy.prepare(observations(policy, 1))
        assert act(policy, inputs).actions.shape == (1, 4, 7) and len(server.seen) == 3
        replies += ["busy: 64 requests are waiting"] * 3
        with pytest.raises(
            Failure, match="does not answer in 3 attempts: busy: 64 requests are waiting"
        ):
            act(policy, inputs)


def test_a_message_that_is_too_large_for_the_server() -> None:
    with serving(PolicyServer(answer, metadata()), max_size=1000) as url:
        policy = remote(url, retries=3)
        with pytest.raises(
            Failure, match=r"takes no message of \d+ bytes: lower rollout\.batch_size"
        ):
            act(policy, policy.prepare(observations(policy, 1)))

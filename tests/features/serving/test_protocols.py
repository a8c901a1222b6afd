"""Every protocol over a socket: golden frames, replies and errors."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.protocols import Convention, PolicySpec
from rlinf_vla.features.serving.array_messages import json_pack, json_unpack, pack, unpack
from rlinf_vla.features.serving.observations import NATIVE
from rlinf_vla.features.serving.service import opened
from rlinf_vla.testing.toy_policy import LinearPolicy
from tests.features.serving.conftest import Running, Start, an_image, native


def connect(server: Running, path: str = "/") -> Any:
    from websockets.sync.client import connect

    return connect(server.url(path), compression=None, max_size=None, open_timeout=60)


@pytest.fixture
def server(start: Start) -> Iterator[Running]:
    with start() as running:
        yield running


@pytest.fixture
def wanted(recipe: Recipe) -> np.ndarray[Any, Any]:
    """Greedy actions of ``native()``."""
    with opened(recipe) as service:
        (outcome,) = service.answer([service.request(native(), NATIVE, 0, 0)])
    return outcome.actions  # type: ignore[union-attr]


def closing(socket: Any) -> tuple[int, str]:
    """The code and reason with which the server closes."""
    from websockets.exceptions import ConnectionClosed

    with pytest.raises(ConnectionClosed) as caught:
        socket.recv(timeout=60)
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, caught.value.rcvd.reason


ARRAY = bytes.fromhex("84 c40b5f5f6e6461727261795f5f c3 c40464617461 c430")
"""An array of 48 bytes, until its data."""
FLOATS = bytes.fromhex("c4056474797065 a33c6634 c4057368617065 920304")
"""Its dtype <f4 and its shape [3, 4]."""


@pytest.mark.parametrize("path", ["/", "/openpi"])
def test_openpi(server: Running, wanted: np.ndarray[Any, Any], path: str) -> None:
    with connect(server, path) as socket:
        greeting = socket.recv(timeout=60)
        assert isinstance(greeting, bytes) and greeting.startswith(b"\x81\xa9rlinf_vla")
        assert unpack(greeting)["rlinf_vla"]["spec"]["chunk"] == 3
        timings = []
        for _ in range(2):
            socket.send(pack(native()))
            reply = socket.recv(timeout=60)
            assert reply.startswith(
                b"\x83\xa7actions"
                + ARRAY
                + wanted.tobytes()
                + FLOATS
                + b"\xadpolicy_timing\x81\xa8infer_ms\xcb"
            )
            found = unpack(reply)
            assert found.keys() == {"actions", "policy_timing", "server_timing"}
            timings.append(set(found["server_timing"]))
        assert timings == [{"infer_ms"}, {"infer_ms", "prev_total_ms"}]


def test_openpi_reads_the_recipes_keys(start: Start, wanted: np.ndarray[Any, Any]) -> None:
    with start(observation="libero") as server, connect(server) as socket:
        socket.recv(timeout=60)
        socket.send(
            pack(
                {
                    "observation/image": an_image(0),
                    "observation/state": np.zeros(8),
                    "prompt": "push",
                }
            )
        )
        assert np.array_equal(unpack(socket.recv(timeout=60))["actions"], wanted)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ("text", "a text frame: observations are binary frames of msgpack"),
        (b"\xc1", "not a msgpack message: FormatError"),
        (
            b"\x80",
            "images.base is missing: an image uint8 [H, W, 3] is expected, or a batch of them",
        ),
    ],
)
def test_an_error_of_openpi_is_one_line_and_ends_the_connection(
    server: Running, frame: bytes | str, reason: str
) -> None:
    with connect(server) as socket:
        socket.recv(timeout=60)
        socket.send(frame)
        assert socket.recv(timeout=60) == reason
        assert closing(socket) == (1011, "Error: see the previous frame.")


def test_vllm_omni(server: Running, wanted: np.ndarray[Any, Any]) -> None:
    with connect(server, "/v1/realtime/robot/openpi") as socket:
        config = unpack(socket.recv(timeout=60))
        assert (
            config["image_resolution"] == [64, 64]
            and config["n_external_cameras"] == 1
            and config["needs_wrist_camera"] is False
        )
        socket.send(pack({"endpoint": "infer", "session_id": "a", **native()}))
        assert socket.recv(timeout=60) == ARRAY + wanted.tobytes() + FLOATS
        socket.send(pack({"endpoint": "reset"}))
        assert (
            socket.recv(timeout=60) == bytes.fromhex("81 a6737461747573 b0") + b"reset successful"
        )
        drawn = []
        for seed in (5, 6, 5):
            socket.send(pack({"seed": seed, "temperature": 1.0, **native()}))
            drawn.append(socket.recv(timeout=60))
        assert drawn[0] == drawn[2] != drawn[1], "a seed determines the actions"
        for bad in (
            b"\xc1",
            pack({"endpoint": "train"}),
            pack({"seed": -1, **native()}),
            "text",
            pack([]),
        ):
            socket.send(bad)
            assert unpack(socket.recv(timeout=60)).keys() == {"type", "message"}
        socket.send(pack(native()))
        assert socket.recv(timeout=60) == ARRAY + wanted.tobytes() + FLOATS, (
            "the connection stays open"
        )


def test_sglangs_websocket(server: Running, wanted: np.ndarray[Any, Any]) -> None:
    with connect(server, "/openpi/policy") as socket:
        metadata = unpack(socket.recv(timeout=60))
        assert metadata["object"] == "action.metadata" and metadata["action_horizon"] == 3
        socket.send(
            pack(
                {
                    "task": "push the cube",
                    "observation.images.base": an_image(0),
                    "observation.state": np.zeros(0),
                }
            )
        )
        assert np.array_equal(unpack(socket.recv(timeout=60))["actions"], wanted)


@pytest.mark.parametrize("keys", [{}, {"protocol": "vla_eval"}])
def test_vla_eval(start: Start, wanted: np.ndarray[Any, Any], keys: dict[str, str]) -> None:
    def message(kind: str, payload: dict[str, Any], seq: int) -> bytes:
        return pack(
            {"type": kind, "payload": payload, "seq": seq, "timestamp": 1.5},
            text_keys=True,
            png=True,
        )

    with start(**keys) as server, connect(server, "/" if keys else "/vla-eval") as socket:
        socket.send(message("hello", {"harness_version": "0.8.0", "protocol_version": 1}, 1))
        hello = unpack(socket.recv(timeout=60))
        assert (hello["type"], hello["seq"], hello["payload"]["protocol_version"]) == (
            "hello",
            1,
            1,
        )
        assert hello["payload"]["observation_params"] == {
            "send_wrist_image": False,
            "send_state": False,
        }
        socket.send(message("episode_start", {"task": {}}, 2))
        observation = {"images": {"agentview": an_image(0)}, "task_description": "push the cube"}
        replies = []
        for seq in range(3, 7):
            socket.send(message("observation", observation, seq))
            replies.append(socket.recv(timeout=60))
        for seq, (reply, action) in enumerate(zip(replies, [*wanted, wanted[0]], strict=True), 3):
            array = (
                b"\x84\xab__ndarray__\xc3\xa4data\xc4\x10"
                + action.tobytes()
                + b"\xa5dtype\xa3<f4\xa5shape\x91\x04"
            )
            frame = (
                b"\x84\xa4type\xa6action\xa7payload\x81\xa7actions"
                + array
                + b"\xa3seq"
                + bytes([seq])
                + b"\xa9timestamp\xcb"
            )
            assert reply[:-8] == frame
        socket.send(message("episode_end", {}, 7))
        socket.send(message("episode_start", {"task": {}}, 8))
        socket.send(message("observation", observation, 9))
        assert np.array_equal(unpack(socket.recv(timeout=60))["payload"]["actions"], wanted[0]), (
            "a new episode begins with a new chunk"
        )
        for bad in (message("observation", {}, 10), message("what", {}, 10)):
            socket.send(message("episode_start", {}, 0))
            socket.send(bad)
            error = unpack(socket.recv(timeout=60))
            assert (error["type"], error["seq"], list(error["payload"])) == ("error", 10, ["error"])
        for bad in (
            b"\xc1",
            pack({"type": "hello"}),
            "text",
            pack({"type": 1, "payload": 1, "seq": "a", "timestamp": 0}),
        ):
            socket.send(bad)
            assert unpack(socket.recv(timeout=60))["type"] == "error"
        socket.send(message("observation", observation, 11))
        assert unpack(socket.recv(timeout=60))["type"] == "action", "the connection stays open"


def test_specs_of_vla_eval() -> None:
    from rlinf_vla.features.serving.vla_eval import action_spec, observation_spec

    libero = Convention(gripper="close_positive", state="axis_angle", images="rot180")
    spec = PolicySpec(8, 7, 8, {"base": (224, 224), "wrist": (224, 224)}, libero)
    assert {name: part["format"] for name, part in action_spec(spec).items()} == {
        "position": "delta_xyz",
        "rotation": "axis_angle",
        "gripper": "binary_close_positive",
    }
    assert observation_spec(spec).keys() == {"agentview", "wrist", "state", "language"}
    assert observation_spec(spec)["state"]["format"] == "eef_pos3_axisangle3_gripper2"
    assert action_spec(PolicySpec(8, 8, 0, {}))["actions"]["format"] == "raw"


def test_openvlas_act(server: Running, wanted: np.ndarray[Any, Any]) -> None:
    body = {"image": an_image(0), "instruction": "push the cube", "unnorm_key": "any"}
    answered = server.http("/act", json_pack(body).encode(), Content_Type="application/json")
    data = base64.b64encode(wanted[0].tobytes()).decode()
    assert (
        answered.status == 200
        and answered.body.decode() == f'{{"__numpy__": "{data}", "dtype": "<f4", "shape": [4]}}'
    )
    answered = server.http("/act", json.dumps({"encoded": json_pack(body)}).encode())
    assert isinstance(answered.json, str) and np.array_equal(json_unpack(answered.json), wanted[0])
    answered = server.http(
        "/act",
        json_pack(
            {"full_image": an_image(0), "state": np.zeros(8), "instruction": "push"}
        ).encode(),
    )
    assert [each.tolist() for each in json_unpack(answered.body)] == wanted.tolist()


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"", 400, "not a JSON message"),
        (b"[]", 400, "the body is no map"),
        (b"{}", 400, "images.base is missing"),
        (b'{"encoded": 1}', 400, "encoded is JSON in a string"),
        (b'{"encoded": "{}", "image": 1}', 400, "encoded is JSON in a string"),
        (b'{"image": {"__numpy__": "", "dtype": "|O", "shape": [0]}}', 400, "dtype"),
    ],
)
def test_errors_of_act(server: Running, body: bytes, status: int, reason: str) -> None:
    answered = server.http("/act", body)
    assert (
        answered.status == status
        and reason in answered.json["error"]
        and "\n" not in answered.json["error"]
    )


def test_another_unnorm_key_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearPolicy, "dataset", "bridge_orig", raising=False)
    with start() as server:
        answered = server.http(
            "/act",
            json_pack(
                {"image": an_image(0), "instruction": "push", "unnorm_key": "fractal"}
            ).encode(),
        )
    assert answered.status == 400 and "'bridge_orig'" in answered.json["error"]


def test_sglangs_http(server: Running, wanted: np.ndarray[Any, Any]) -> None:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(an_image(0)).save(file, "PNG")
    image = {"base64": base64.b64encode(file.getvalue()).decode(), "mime_type": "image/png"}
    observation = {"images": {"base": image}, "state": []}
    body = {"model": "x", "input": {"task": "push the cube", "observation": observation}}
    answered = server.http(
        "/v1/actions/generations", json.dumps(body).encode(), Content_Type="application/json"
    )
    assert (
        answered.json["object"] == "action.generation"
        and answered.json["data"][0]["action"]["values"] == wanted.tolist()
    )
    body["input"] = {
        "prompt": "push the cube",
        "observation": {"images": {"base": an_image(0)}, "state": np.zeros(0)},
    }
    body["runtime"] = {"response_format": "raw"}
    answered = server.http(
        "/v1/actions/generations",
        pack(body),
        Content_Type="application/msgpack",
        Accept="application/msgpack",
    )
    assert np.array_equal(unpack(answered.body)["actions"], wanted)
    metadata = server.http("/v1/actions/metadata").json
    assert metadata["object"] == "action.metadata" and metadata["cameras"] == ["base"]
    for bad in (b"{}", b'{"input": {"observation": {"images": {"base": {"base64": "?"}}}}}'):
        assert server.http("/v1/actions/generations", bad).status == 400


ARRAYS: tuple[Any, ...] = (np.zeros(2), np.zeros(0), np.zeros((2, 2), np.uint8), [1], 5)


@pytest.mark.parametrize("wrong", ARRAYS, ids=repr)
def test_what_is_no_text_where_a_name_belongs_is_refused(server: Running, wrong: Any) -> None:
    """In every protocol, and never as our own mistake."""
    act = {"image": an_image(0), "instruction": "push"}
    found = [
        server.http("/act", json_pack(act | {name: wrong}).encode()).json["error"]
        for name in ("unnorm_key", "instruction")
    ]
    observation = {"task": "push", "observation": {"images": {"base": an_image(0)}}}
    for more in (
        {"runtime": {"response_format": wrong}},
        {"runtime": {"output_format": wrong}},
        {"input": observation | {"task": wrong}},
    ):
        answered = server.http(
            "/v1/actions/generations",
            pack({"input": observation} | more),
            Content_Type="application/msgpack",
        )
        assert answered.status == 400
        found.append(answered.json["error"])
    with connect(server, "/v1/realtime/robot/openpi") as socket:
        socket.recv(timeout=60)
        for name in ("endpoint", "session_id", "instruction"):
            socket.send(pack(native() | {name: wrong}))
            found.append(unpack(socket.recv(timeout=60))["message"])
    for path, message in (
        ("/", native(instruction=wrong)),
        ("/openpi/policy", {"task": wrong, "observation.images.base": an_image(0)}),
    ):
        with connect(server, path) as socket:
            socket.recv(timeout=60)
            socket.send(pack(message))
            found.append(socket.recv(timeout=60))
    with connect(server, "/vla-eval") as socket:
        payload = {"images": {"agentview": an_image(0)}, "task_description": "push"}
        whole = {"type": "observation", "payload": payload, "seq": 1, "timestamp": 0.0}
        for bad in (
            {"type": wrong},
            {"payload": wrong},
            {"payload": payload | {"task_description": wrong}},
        ):
            socket.send(pack(whole | bad))
            found.append(unpack(socket.recv(timeout=60))["payload"]["error"])
    assert len(found) == 13 and not [each for each in found if "internal" in each or "\n" in each]


def test_health_and_configuration(server: Running) -> None:
    assert server.http("/healthz").body == b"OK\n"
    assert server.http("/health").json == {"status": "ok"}
    assert server.http("/config").json["config"] == {"max_batch_size": 8, "max_wait_time": 0.002}
    assert server.http("/config?max_batch_size=99").status == 403, "a GET changes nothing"
    assert server.http("/nowhere").status == 404 and server.http("/act").status == 405


def test_metrics(server: Running) -> None:
    server.http("/act", b"")
    server.http("/act", json_pack({"image": an_image(0), "instruction": "push"}).encode())
    text = server.http("/metrics").body.decode()
    assert 'rlinf_vla_requests_total{dialect="act",outcome="mistake"} 1.0' in text
    assert 'rlinf_vla_requests_total{dialect="act",outcome="ok"} 1.0' in text
    assert "rlinf_vla_call_rows_sum 1.0" in text

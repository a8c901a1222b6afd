"""vla-eval's websocket: the client speaks first, and gets one action for every observation."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.core.protocols import PolicySpec
from rlinf_vla.features.serving.array_messages import MessageError, pack, unpack
from rlinf_vla.features.serving.observations import VLA_EVAL, name_in
from rlinf_vla.features.serving.sessions import Frame
from rlinf_vla.features.serving.state import Refusal, State

PROTOCOL = 1
GRIPPERS = {
    "close_positive": "binary_close_positive",
    "open_positive": "binary_close_negative",
    "zero_to_one": "continuous_01",
}
STATES = {"axis_angle": "eef_pos3_axisangle3_gripper2", "quaternion": "eef_pos3_quat4_gripper1"}
QUIET = ("episode_start", "episode_end", "error")
"""Messages that get no answer."""


class VlaEval:
    """Holds the rest of the last chunk; a new episode begins with a new one."""

    name = "vla_eval"

    def __init__(self, state: State, client: str) -> None:
        """``client``: its address."""
        self.state = state
        self.client = client
        self.seed = state.number()
        self.step = 0
        self._actions: deque[NDArray[np.float32]] = deque()
        self._seq: Any = 0

    def greeting(self) -> None:
        return None

    async def reply(self, frame: Frame) -> Frame | None:
        try:
            message = await self.state.read(frame, lambda: self._read(frame))
        except MessageError as error:
            raise Refusal(Refusal.MISTAKE, str(error)) from None
        self._seq = message["seq"]
        kind = message["type"]
        payload = message["payload"]
        if kind == "hello":
            return self._packed("hello", self.hello())
        if kind in QUIET:
            self._actions.clear()
            return None
        if kind != "observation":
            raise Refusal(
                Refusal.MISTAKE,
                "type is none of hello, observation, episode_start, episode_end, error",
            )
        if not self._actions:
            service = self.state.service
            read = lambda: service.request(payload, VLA_EVAL, self.seed, self.step)  # noqa: E731
            answer = await self.state.infer(self.name, self.client, frame, read)
            self.step += 1
            self._actions.extend(answer.actions.reshape(-1, answer.actions.shape[-1]))
        return self._packed("action", {"actions": self._actions.popleft()})

    def _read(self, frame: Frame) -> dict[str, Any]:
        if isinstance(frame, str):
            raise MessageError("a text frame: messages are binary frames of msgpack")
        message = unpack(frame, self.state.limits)
        if (
            not isinstance(message, dict)
            or not {"type", "payload", "seq", "timestamp"} <= message.keys()
        ):
            raise MessageError("a message is a map of type, payload, seq and timestamp")
        name_in(message, "type")
        if type(message["seq"]) is not int or not isinstance(message["payload"], dict):
            raise MessageError("seq is a whole number, and payload a map")
        return message

    def _packed(self, kind: str, payload: dict[str, Any]) -> bytes:
        message = {"type": kind, "payload": payload, "seq": self._seq, "timestamp": time.time()}
        return pack(message, text_keys=True)

    def hello(self) -> dict[str, Any]:
        """Return what the policy needs and gives, as far as its checkpoint tells."""
        spec = self.state.service.spec
        metadata = self.state.described()
        return {
            "harness_version": f"rlinf-vla {metadata['version']}",
            "protocol_version": PROTOCOL,
            "model_server": metadata["policy"]["model"],
            "capabilities": {},
            "observation_params": {
                "send_wrist_image": "wrist" in spec.images,
                "send_state": spec.state_dim > 0,
            },
            "action_spec": action_spec(spec),
            "observation_spec": observation_spec(spec),
        }

    def refused(self, refusal: Refusal) -> tuple[Frame, int | None]:
        return self._packed("error", {"error": str(refusal)}), None


def action_spec(spec: PolicySpec) -> dict[str, Any]:
    gripper = spec.convention.gripper
    if gripper is None or spec.action_dim != 7:
        return {"actions": _part("actions", spec.action_dim, "raw")}
    return {
        "position": _part("position", 3, "delta_xyz", (-1, 1)),
        "rotation": _part("rotation", 3, "axis_angle", (-3.15, 3.15)),
        "gripper": _part(
            "gripper", 1, GRIPPERS[gripper], (0, 1) if gripper == "zero_to_one" else (-1, 1)
        ),
    }


def observation_spec(spec: PolicySpec) -> dict[str, Any]:
    images = {
        "agentview" if name == "base" else name: _part("image", 0, "rgb_hwc_uint8")
        for name in spec.images
    }
    state = (
        {"state": _part("state", spec.state_dim, STATES.get(spec.convention.state or "", "raw"))}
        if spec.state_dim
        else {}
    )
    return images | state | {"language": _part("language", 0, "language")}


def _part(
    name: str, dims: int, meaning: str, range_: tuple[float, float] | None = None
) -> dict[str, Any]:
    return {"name": name, "dims": dims, "format": meaning} | (
        {} if range_ is None else {"range": list(range_)}
    )

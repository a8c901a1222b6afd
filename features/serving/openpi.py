"""openpi's websocket, and what vLLM-Omni and SGLang made of it."""

from __future__ import annotations

import time
from typing import Any

from rlinf_vla.features.serving.array_messages import MessageError, pack, unpack
from rlinf_vla.features.serving.observations import NATIVE, SEEDS, SGLANG, Keys, Request, name_in
from rlinf_vla.features.serving.service import Answer
from rlinf_vla.features.serving.sessions import Frame
from rlinf_vla.features.serving.state import Refusal, State

ERROR, TRY_LATER = 1011, 1013


class OpenPi:
    """Metadata first, then an observation and its reply in turn; an error ends the connection."""

    name = "openpi"
    encodes = True
    """Whether a request may ask for features, as our own clients do."""

    def __init__(self, state: State, client: str) -> None:
        """``client``: its address."""
        self.state = state
        self.client = client
        self.seed = state.number()
        self.step = 0
        self._total: float | None = None

    def greeting(self) -> Frame:
        return pack(self.metadata())

    def metadata(self) -> dict[str, Any]:
        return {"rlinf_vla": self.state.described()}

    async def reply(self, frame: Frame) -> Frame:
        began = time.perf_counter()
        answer = await self.state.infer(
            self.name, self.client, frame, lambda: self.request(self.read(frame))
        )
        timing = {"infer_ms": 1e3 * (time.perf_counter() - began)}
        if self._total is not None:
            timing["prev_total_ms"] = 1e3 * self._total
        reply = pack(self.answered(answer, timing))
        self._total = time.perf_counter() - began
        return reply

    def answered(self, answer: Answer, timing: dict[str, float]) -> Any:
        reply: dict[str, Any] = (
            {"actions": answer.actions}
            if answer.features is None
            else {"features": answer.features}
        )
        return reply | {
            "policy_timing": {"infer_ms": 1e3 * answer.seconds},
            "server_timing": timing,
        }

    def read(self, frame: Frame) -> Any:
        """Return the message of a frame. Raises MessageError."""
        if isinstance(frame, str):
            raise MessageError("a text frame: observations are binary frames of msgpack")
        return unpack(frame, self.state.limits)

    def request(self, message: Any) -> Request:
        """Return the request of an observation, our own or in the recipe's keys."""
        self.step += 1
        own = isinstance(message, dict) and isinstance(message.get("images"), dict)
        return self.state.service.request(
            message, NATIVE if own else self.keys(), self.seed, self.step - 1, self.encodes and own
        )

    def keys(self) -> Keys:
        return self.state.service.keys

    def refused(self, refusal: Refusal) -> tuple[Frame, int | None]:
        return str(refusal), TRY_LATER if refusal.kind == Refusal.BUSY else ERROR


class VllmOmni(OpenPi):
    """``/v1/realtime/robot/openpi``: replies are bare arrays, errors are messages."""

    name = "vllm_omni"
    encodes = False

    def metadata(self) -> dict[str, Any]:
        spec = self.state.service.spec
        cameras = [name for name in spec.images if name != "wrist"]
        return {
            "image_resolution": list(next(iter(spec.images.values()), (0, 0))),
            "n_external_cameras": len(cameras),
            "needs_wrist_camera": len(cameras) < len(spec.images),
            "needs_stereo_camera": False,
            "needs_session_id": False,
            "action_horizon": spec.chunk,
            "action_dim": spec.action_dim,
        } | super().metadata()

    def read(self, frame: Frame) -> dict[str, Any]:
        if not isinstance(message := super().read(frame), dict):
            raise MessageError("the message is no map")
        return message

    async def reply(self, frame: Frame) -> Frame:
        try:
            message = await self.state.read(frame, lambda: self.read(frame))
            endpoint = name_in(message, "endpoint") or "infer"
            name_in(message, "session_id")
        except MessageError as error:
            raise Refusal(Refusal.MISTAKE, str(error)) from None
        if endpoint == "reset":
            self.seed = self.state.number()
            self.step = 0
            return pack({"status": "reset successful"})
        if endpoint != "infer":
            raise Refusal(Refusal.MISTAKE, "endpoint is neither infer nor reset")
        answer = await self.state.infer(
            self.name, self.client, frame, lambda: self.request(message)
        )
        return pack(answer.actions)

    def request(self, message: Any) -> Request:
        """An integer ``seed`` alone determines the noise."""
        seed = message.pop("seed", None)
        if seed is None:
            return super().request(message)
        if type(seed) is not int or not 0 <= seed < SEEDS:
            raise MessageError(f"seed is no whole number from 0 to {SEEDS - 1}")
        before = (self.seed, self.step)
        self.seed = seed
        self.step = 0
        try:
            return super().request(message)
        finally:
            self.seed, self.step = before

    def refused(self, refusal: Refusal) -> tuple[Frame, int | None]:
        return pack({"type": "error", "message": str(refusal)}), None


class SgLang(OpenPi):
    """``/openpi/policy``: the same with keys as LeRobot's."""

    name = "sglang"
    encodes = False

    def metadata(self) -> dict[str, Any]:
        return action_metadata(self.state)

    def keys(self) -> Keys:
        return SGLANG


def action_metadata(state: State) -> dict[str, Any]:
    """Return what SGLang's clients ask of a policy."""
    spec = state.service.spec
    metadata = state.described()
    return {
        "object": "action.metadata",
        "model": metadata["policy"]["name"],
        "cameras": list(spec.images),
        "state_dim": spec.state_dim,
        "action_dim": spec.action_dim,
        "action_horizon": spec.chunk,
        "rlinf_vla": metadata,
    }

"""HTTP: health, metrics, OpenVLA's ``/act`` and SGLang's ``/v1/actions``."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from rlinf_vla.features.serving.array_messages import (
    MessageError,
    json_pack,
    json_unpack,
    pack,
    unpack,
)
from rlinf_vla.features.serving.message_images import read_image
from rlinf_vla.features.serving.observations import NATIVE, Keys, Request, flat, name_in
from rlinf_vla.features.serving.openpi import action_metadata
from rlinf_vla.features.serving.service import Answer
from rlinf_vla.features.serving.state import Refusal, State, address_of, internal

MSGPACK = "application/msgpack"
STATUS = {Refusal.MISTAKE: 400, Refusal.BUSY: 503, Refusal.INTERNAL: 500}
GENERATION = Keys("input.observation.images.{}", ("input.observation.state",), "input.task")
LEFT = 499
"""Status of a request whose client has left; nobody sees it."""


class TooLarge(Exception):
    """The body exceeds the limit."""


class Http:
    """The HTTP endpoints of a server."""

    def __init__(self, state: State) -> None:
        self.state = state

    async def healthz(self, request: HttpRequest) -> Response:
        ready = self.state.ready.is_set() and not self.state.draining.is_set()
        return PlainTextResponse("OK\n") if ready else PlainTextResponse("not ready\n", 503)

    async def health(self, request: HttpRequest) -> Response:
        ready = self.state.ready.is_set() and not self.state.draining.is_set()
        return JSONResponse({"status": "ok" if ready else "not ready"}, 200 if ready else 503)

    async def config(self, request: HttpRequest) -> Response:
        """vla-eval's; a GET that changes something could be sent by any web page."""
        if request.query_params:
            return _error(
                403, "the configuration is read-only: restart the server with other serve.* keys"
            )
        if not self.state.ready.is_set():
            return _error(503, "the policy is being loaded")
        rows = self.state.service.defaults.most_rows
        wait = self.state.config.max_wait_ms / 1e3
        return JSONResponse(
            {"applied": {}, "config": {"max_batch_size": rows, "max_wait_time": wait}}
        )

    async def metrics(self, request: HttpRequest) -> Response:
        return Response(self.state.metrics.text(), media_type="text/plain; version=0.0.4")

    async def metadata(self, request: HttpRequest) -> Response:
        return (
            JSONResponse(action_metadata(self.state))
            if self.state.ready.is_set()
            else _error(503, "the policy is being loaded")
        )

    async def act(self, request: HttpRequest) -> Response:
        """OpenVLA's: the first action of a chunk; OpenVLA-OFT's (``full_image``): all of them."""

        async def answered(body: bytes) -> Response:
            form: dict[str, bool] = {}

            def read() -> Request:
                message = json_unpack(body, self.state.limits)
                form["encoded"] = isinstance(message, dict) and "encoded" in message
                if form["encoded"]:
                    if set(message) != {"encoded"} or not isinstance(message["encoded"], str):
                        raise MessageError("encoded is JSON in a string, and nothing is beside it")
                    message = json_unpack(message["encoded"], self.state.limits)
                form["chunk"] = isinstance(message, dict) and "full_image" in message
                return self._act_request(message)

            return self.act_reply(
                await self.state.infer("act", address_of(request), body, read), **form
            )

        return await self._answered(request, answered)

    def act_reply(self, answer: Answer, encoded: bool, chunk: bool) -> Response:
        actions = json_pack(list(answer.actions) if chunk else answer.actions[0])
        return Response(json.dumps(actions) if encoded else actions, media_type="application/json")

    def _act_request(self, message: Any) -> Request:
        if not isinstance(message, dict):
            raise MessageError("the body is no map")
        service = self.state.service
        key = name_in(message, "unnorm_key")
        ours = getattr(service.policy, "dataset", None)
        ours = ours or getattr(
            service.recipe.model.options, "unnorm_key", None
        )  # of a policy in another one
        if None not in (key, ours) and key != ours:
            raise MessageError(f"unnorm_key: this policy acts by {ours!r}")
        others = iter(sorted(name for name in message if "wrist" in name))
        sources = {
            name: next(others, "") if number else ""
            for number, name in enumerate(service.spec.images)
        }
        first = message.get("full_image", message.get("image"))
        entries = {
            f"images.{name}": message.get(source) if source else None
            for name, source in sources.items()
        }
        entries |= {f"images.{name}": first for name in list(sources)[:1]}
        entries |= {"state": message.get("state"), "instruction": message.get("instruction")}
        return service.request(
            {name: entry for name, entry in entries.items() if entry is not None},
            NATIVE,
            self.state.number(),
            0,
        )

    async def generations(self, request: HttpRequest) -> Response:
        """SGLang's: observation and reply in JSON or msgpack."""
        packed = request.headers.get("content-type", "").startswith(MSGPACK)

        async def answered(body: bytes) -> Response:
            runtime: dict[str, Any] = {}

            def read() -> Request:
                message = (
                    unpack(body, self.state.limits)
                    if packed
                    else json_unpack(body, self.state.limits)
                )
                entries = flat(message)
                runtime.update(
                    {
                        name: name_in(entries, f"runtime.{name}")
                        for name in ("response_format", "output_format")
                    }
                )
                entries.setdefault("input.task", entries.get("input.prompt"))
                for name in self.state.service.spec.images:
                    _decode_image(entries, GENERATION.image.format(name), self.state.limits.size)
                return self.state.service.request(entries, GENERATION, self.state.number(), 0)

            answer = await self.state.infer("sglang_http", address_of(request), body, read)
            return self._generation(answer, runtime, packed or _accepts(request))

        return await self._answered(request, answered)

    def _generation(self, answer: Answer, runtime: dict[str, Any], packed: bool) -> Response:
        as_list = not packed or runtime["output_format"] == "list"
        actions = answer.actions.tolist() if as_list else answer.actions
        timings = {"infer_ms": 1e3 * answer.seconds}
        envelope = {
            "id": f"act-{uuid.uuid4().hex}",
            "object": "action.generation",
            "model": self.state.service.metadata["policy"]["name"],
            "data": [{"index": 0, "action": {"values": actions}}],
            "timings": timings,
        }
        body = (
            {"actions": actions, "timings": timings}
            if runtime["response_format"] == "raw"
            else envelope
        )
        return Response(pack(body), media_type=MSGPACK) if packed else JSONResponse(body)

    async def _answered(
        self, request: HttpRequest, work: Callable[[bytes], Awaitable[Response]]
    ) -> Response:
        """Return the response of ``work``; drop it if the client leaves, and say what is wrong."""
        config = self.state.config
        try:
            body = await asyncio.wait_for(
                _body(request, config.max_message_bytes), config.handshake_timeout_s
            )
        except TooLarge:
            return _error(413, f"the body has more than {config.max_message_bytes} bytes")
        except ClientDisconnect:
            return Response(status_code=LEFT)
        except TimeoutError:
            return _error(408, f"the body did not come within {config.handshake_timeout_s:g} s")
        answer, gone = asyncio.ensure_future(work(body)), asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            return await answer if answer.done() else Response(status_code=LEFT)
        except Refusal as refusal:
            return _error(STATUS[refusal.kind], str(refusal))
        except Exception as error:
            return _error(500, str(internal(error)))
        finally:
            gone.cancel()
            answer.cancel()


async def _body(request: HttpRequest, most: int) -> bytes:
    if int(request.headers.get("content-length", 0)) > most:
        raise TooLarge
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise TooLarge
    return bytes(body)


async def _gone(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _decode_image(entries: dict[str, Any], key: str, most: int) -> None:
    """Replace ``{base64, mime_type}`` by the image; the file itself says which format it has."""
    if isinstance(text := entries.get(f"{key}.base64"), str):
        try:
            entries[key] = read_image(base64.b64decode(text, validate=True), most)
        except (binascii.Error, ValueError) as error:
            raise (
                error if isinstance(error, MessageError) else MessageError(f"{key} is no base64")
            ) from None


def _accepts(request: HttpRequest) -> bool:
    return MSGPACK in request.headers.get("accept", "")


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status, {"Retry-After": "1"} if status == 503 else None)

"""Converse over one websocket: read, answer, refuse, and close when the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from starlette.websockets import WebSocket, WebSocketDisconnect

from rlinf_vla.features.serving.connections import LINK
from rlinf_vla.features.serving.state import Refusal, State, internal

T = TypeVar("T")
Frame = bytes | str
GOING_AWAY, NORMAL = 1001, 1000


class Dialect(Protocol):
    """The messages of one kind of client, on one connection."""

    def greeting(self) -> Frame | None:
        """Return what the server says first."""

    async def reply(self, frame: Frame) -> Frame | None:
        """Return the reply to a frame. Raises Refusal."""

    def refused(self, refusal: Refusal) -> tuple[Frame, int | None]:
        """Return the frame that says so, and the code to close with; None: go on."""


class Left(Exception):
    """The client has left."""


async def converse(socket: WebSocket, dialect: Dialect, state: State) -> None:
    """Serve one client until it leaves, is idle for too long, or the server stops."""
    await socket.accept()
    reader = _Reader(socket)
    stop = asyncio.create_task(state.draining.wait())
    try:
        with state.session():
            code, reason = await _conversation(reader, dialect, state, stop)
        await asyncio.wait_for(socket.close(code, reason), state.config.handshake_timeout_s)
    except (Left, WebSocketDisconnect, TimeoutError, RuntimeError, OSError):
        pass  # the client has left, or does not read: its connection is closed
    finally:
        await _cancelled(stop, reader.pending)


async def _conversation(
    reader: _Reader, dialect: Dialect, state: State, stop: asyncio.Task[Any]
) -> tuple[int, str]:
    """Return the code to close with, and the reason. Raises Left."""
    idle = state.config.idle_timeout_s
    if not state.ready.is_set():
        await reader.during(_either(state.ready, state.draining))
    if state.ready.is_set():
        await reader.send(dialect.greeting(), idle)
    while True:
        frame = await reader.frame(idle, stop)
        if frame is None:
            return (
                (GOING_AWAY, "the server is stopping")
                if stop.done()
                else (NORMAL, f"nothing came for {idle:g} s")
            )
        code = None
        try:
            reply = await reader.during(dialect.reply(frame))
        except Refusal as refusal:
            reply, code = dialect.refused(refusal)
        except (Left, WebSocketDisconnect):
            raise
        except Exception as error:
            reply, code = dialect.refused(internal(error))
        await reader.send(reply, idle)
        if code is not None:
            return code, "Error: see the previous frame."


class _Reader:
    """Frames of a websocket; also notices while it is answered that the client has left."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self.pending: asyncio.Task[Any] | None = None

    async def frame(self, timeout: float, stop: asyncio.Task[Any]) -> Frame | None:
        """Return the next frame; None when ``stop`` ends, or if the client gave no sign of life for
        ``timeout``. It is asked for one, by a ping, in the middle of each such time. Raises Left.
        """
        pending = self._next()
        link = self._socket.scope["state"][LINK]
        loop = asyncio.get_running_loop()
        while not (pending.done() or stop.done()):
            begun = loop.time()
            await asyncio.wait(
                {pending, stop}, timeout=timeout / 2, return_when=asyncio.FIRST_COMPLETED
            )
            if not (pending.done() or stop.done()):
                link.ask()
                await asyncio.wait(
                    {pending, stop}, timeout=timeout / 2, return_when=asyncio.FIRST_COMPLETED
                )
                if not pending.done() and link.heard < begun:
                    return None
        if stop.done():
            return None
        self.pending = None
        message = _said(pending)
        data = message.get("bytes")
        return message.get("text", "") if data is None else data

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``, and cancel it if the client leaves. Raises Left."""
        task = asyncio.create_task(work)
        pending = self._next()
        try:
            await asyncio.wait({task, pending}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                _said(pending)
            return await task
        finally:
            await _cancelled(task)

    async def send(self, frame: Frame | None, timeout: float) -> None:
        """Send a frame. Raises TimeoutError if the client does not read it."""
        if isinstance(frame, str):
            await asyncio.wait_for(self._socket.send_text(frame), timeout)
        elif frame is not None:
            await asyncio.wait_for(self._socket.send_bytes(frame), timeout)

    def _next(self) -> asyncio.Task[Any]:
        if self.pending is None:
            self.pending = asyncio.create_task(self._socket.receive())
        return self.pending


def _said(pending: asyncio.Task[Any]) -> dict[str, Any]:
    message: dict[str, Any] = pending.result()
    if message["type"] == "websocket.disconnect":
        raise Left
    return message


async def _either(*events: asyncio.Event) -> None:
    """Wait for the first of the events."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancelled(*waits)


async def _cancelled(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel what has not ended; errors of these tasks are of no interest any more."""
    for task in tasks:
        if task is not None:
            task.cancel()
            with suppress(BaseException):
                await task

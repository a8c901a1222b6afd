"""Limits on connections that uvicorn does not have: their number, and the time for a request."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState

MOST_FRAGMENTS = 4096
"""Frames of one websocket message; empty ones cost memory, too."""
MOST_UNREAD = 1 << 20
"""Bytes of pongs that a client does not read."""
GRACE_S = 3.0
"""For a client to read the last frame of a connection, and to answer that it closes."""
LINK = "websocket"
FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Waiting:
    """Connections without a complete request, oldest first; the oldest makes room for a new one."""

    def __init__(self, most: int, timeout: float) -> None:
        self._most = most
        self._timeout = timeout
        self._waiting: dict[H11Protocol, asyncio.TimerHandle] = {}

    def begin(self, protocol: H11Protocol) -> None:
        """Give ``protocol`` the time for the head of a request, and a place among the others."""
        self.end(protocol)
        self._waiting[protocol] = protocol.loop.call_later(self._timeout, protocol.transport.abort)
        if len(protocol.connections) <= self._most:
            return
        oldest = next(iter(self._waiting))
        if oldest is protocol:
            protocol.transport.write(FULL)
            protocol.transport.close()
        else:
            oldest.transport.abort()
        self.end(oldest)

    def end(self, protocol: H11Protocol) -> None:
        if (timer := self._waiting.pop(protocol, None)) is not None:
            timer.cancel()


class GuardedConfig(Config):
    """uvicorn's settings, and where connections wait."""

    def __init__(self, app: Any, waiting: Waiting, **settings: Any) -> None:
        super().__init__(app, http=GuardedHttp, ws=GuardedWebSocket, **settings)
        self.waiting = waiting


class GuardedHttp(H11Protocol):
    """Closed if the head of a request does not come in time."""

    config: GuardedConfig

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override, unused-ignore]
        super().connection_made(transport)
        self.config.waiting.begin(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._running() or self not in self.connections:  # upgraded to a websocket
            self.config.waiting.end(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which may begin a request that came early
        if not self._running() and not self.transport.is_closing():
            self.config.waiting.begin(self)

    def _running(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        self.config.waiting.end(self)
        super().connection_lost(exc)


class GuardedWebSocket(WebSocketsSansIOProtocol):
    """Closed if it collects frames or pongs without end, or is not read after its end.

    heard: time of the last ping or answer to a ping (``loop.time()``). The application finds this
    object in its scope's ``state``, under ``LINK``.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.close_timeout = GRACE_S
        self.heard = self.loop.time()
        self.app_state = {**self.app_state, LINK: self}

    def ask(self) -> None:
        """Send a ping, which a living client answers."""
        with suppress(InvalidState):  # it is being closed
            self.conn.send_ping(b"")
            self.transport.write(b"".join(self.conn.data_to_send()))

    async def run_asgi(self) -> None:
        try:
            await super().run_asgi()
        finally:
            self.loop.call_later(GRACE_S, self.transport.abort)

    def handle_cont(self, event: Any) -> None:
        if len(self.frames) >= MOST_FRAGMENTS:
            self.transport.abort()
            return
        super().handle_cont(event)

    def handle_pong(self, event: Any) -> None:
        self.heard = self.loop.time()

    def handle_ping(self) -> None:
        self.heard = self.loop.time()
        super().handle_ping()
        if self.transport.get_write_buffer_size() > MOST_UNREAD:
            self.transport.abort()

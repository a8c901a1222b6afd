"""The paths of a server, and who may use them."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from rlinf_vla.features.serving.hosts import Hosts
from rlinf_vla.features.serving.http import Http
from rlinf_vla.features.serving.openpi import OpenPi, SgLang, VllmOmni
from rlinf_vla.features.serving.sessions import Dialect, converse
from rlinf_vla.features.serving.state import State, address_of
from rlinf_vla.features.serving.vla_eval import VlaEval

OPEN = ("/healthz", "/health")
"""Paths that need no token: they say whether the server is ready."""
ROOTS: dict[str, Callable[[State, str], Dialect]] = {"openpi": OpenPi, "vla_eval": VlaEval}
DIALECTS: dict[str, Callable[[State, str], Dialect]] = {
    "/openpi": OpenPi,
    "/vla-eval": VlaEval,
    "/v1/realtime/robot/openpi": VllmOmni,
    "/openpi/policy": SgLang,
}


def build_app(state: State) -> ASGIApp:
    """Return the application: health, metrics, and every dialect at its path."""
    http = Http(state)
    root = ROOTS[state.config.protocol]
    routes: list[BaseRoute] = [
        Route("/healthz", http.healthz),
        Route("/health", http.health),
        Route("/config", http.config),
        Route("/metrics", http.metrics),
        Route("/act", http.act, methods=["POST"]),
        Route("/v1/actions/generations", http.generations, methods=["POST"]),
        Route("/v1/actions/metadata", http.metadata),
    ]
    routes += [
        WebSocketRoute(path, _endpoint(state, dialect))
        for path, dialect in {"/": root, **DIALECTS}.items()
    ]
    return Guarded(Starlette(routes=routes), state)


def _endpoint(
    state: State, dialect: Callable[[State, str], Dialect]
) -> Callable[[WebSocket], Awaitable[None]]:
    async def endpoint(socket: WebSocket) -> None:
        await converse(socket, dialect(state, address_of(socket)), state)

    return endpoint


class Guarded:
    """Lets requests with the token pass, and none that a web page in a browser makes.

    A browser says the page's origin with every websocket and POST to another site, and the name of
    the site with every request. Without these checks, any web page that a user opens could use a
    server on the user's machine.
    """

    def __init__(self, app: ASGIApp, state: State) -> None:
        self.app = app
        self.state = state
        self.hosts = Hosts(state.config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return
        refusal = self._refusal(HTTPConnection(scope))
        if refusal is None:
            await self.app(scope, receive, send)
            return
        status, reason, text = refusal
        self.state.metrics.refused.labels(reason).inc()
        response = JSONResponse(
            {"error": text}, status, {"WWW-Authenticate": "Bearer"} if status == 401 else None
        )
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(response)
        else:
            await response(scope, receive, send)

    def _refusal(self, request: HTTPConnection) -> tuple[int, str, str] | None:
        if "origin" in request.headers:
            return 403, "origin", "requests of web pages are not served"
        if (unknown := self.hosts.refusal(request)) is not None:
            return 421, "host", unknown
        if request.url.path in OPEN or self.state.token is None:
            return None
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        valid = kind.lower() in ("bearer", "api-key") and hmac.compare_digest(
            token.strip().encode(), self.state.token.encode()
        )
        return None if valid else (401, "token", "send the header Authorization: Bearer TOKEN")

"""Run a policy server: listen, load, answer, and stop without losing a running request."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from uvicorn import Server

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.config.serve import ServeConfig
from rlinf_vla.core.sockets import listening_at, url_of
from rlinf_vla.features.serving.app import build_app
from rlinf_vla.features.serving.connections import GuardedConfig, Waiting
from rlinf_vla.features.serving.service import PolicyService, opened
from rlinf_vla.features.serving.state import State

Open = Callable[[], AbstractContextManager[PolicyService]]
Say = Callable[[str], None]


def serve(recipe: Recipe, token: str | None) -> None:
    """Serve until SIGINT or SIGTERM. Raises UserError."""
    logging.getLogger("uvicorn").setLevel(
        logging.CRITICAL
    )  # a line for each malformed request helps nobody
    listener = listening(recipe.serve)
    with listener:
        asyncio.run(_until_signal(listener, recipe, token, partial(print, flush=True)))


async def _until_signal(
    listener: socket.socket, recipe: Recipe, token: str | None, say: Say
) -> None:
    stop = asyncio.Event()
    with _signals(stop):
        await run(listener, recipe.serve, partial(opened, recipe), token, stop, say)


async def run(
    listener: socket.socket,
    config: ServeConfig,
    open_service: Open,
    token: str | None,
    stop: asyncio.Event,
    say: Say,
) -> None:
    """Serve on ``listener`` until ``stop``, then finish what runs. Raises what loading raises."""
    loop = asyncio.get_running_loop()
    state = State(config, token)
    server = Listener(config, state)
    thread = ThreadPoolExecutor(1, "serve-policy")
    opened = ExitStack()
    listens = asyncio.create_task(server.serve([listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        say(
            f"loading the policy; {url_of(listener, 'wss' if config.certificate else 'ws')} accepts connections"
        )
        loading = loop.run_in_executor(thread, lambda: opened.enter_context(open_service()))
        tasks: set[asyncio.Future[Any]] = {loading, listens, stopping}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            state.open(await loading, thread)
            say(
                f"ready: policy {state.service.policy.name}, {config.protocol} at /, other protocols at their paths (docs/serving.md)"
            )
            for line in state.service.policy.spec.remarks:
                say(line)
            await asyncio.wait(tasks - {loading}, return_when=asyncio.FIRST_COMPLETED)
        elif not loading.done():
            state.draining.set()
            say("stopping as soon as the policy is loaded")
            await loading
    finally:
        state.draining.set()
        until = loop.time() + config.drain_s
        while (state.working or state.sessions) and loop.time() < until and not listens.done():
            await asyncio.sleep(0.01)
        server.should_exit = True
        await asyncio.wait({listens})
        stopping.cancel()
        await state.close()
        await loop.run_in_executor(thread, opened.close)
        thread.shutdown()
    await listens
    say("stopped")


class Listener(Server):
    """uvicorn's server, without its handling of signals, on a socket that is open already."""

    def __init__(self, config: ServeConfig, state: State) -> None:
        waiting = Waiting(config.max_connections, config.handshake_timeout_s)
        settings: dict[str, Any] = {
            "log_config": None,
            "access_log": False,
            "lifespan": "off",
            "server_header": False,
            "ws_max_size": config.max_message_bytes,
            "ws_ping_interval": None,  # sessions.py pings: clients whose event loop is busy for long do not answer in time
            "ws_per_message_deflate": False,
            "timeout_graceful_shutdown": 1,
            "ssl_certfile": config.certificate,
            "ssl_keyfile": config.private_key,
        }
        super().__init__(GuardedConfig(build_app(state), waiting, **settings))
        self._handshake_timeout = config.handshake_timeout_s if config.certificate else None
        try:
            self.config.load()
        except (OSError, ssl.SSLError) as error:
            raise UserError(
                f"serve.certificate={config.certificate}: {error.strerror or error}: give PEM files of a chain and its key"
            ) from None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, but for the time limit of TLS handshakes."""
        loop = asyncio.get_running_loop()
        config = self.config

        def protocol() -> asyncio.Protocol:
            return config.http_protocol_class(
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )  # type: ignore[call-arg, unused-ignore]

        await self.lifespan.startup()
        assert sockets
        self.servers = [
            await loop.create_server(
                protocol,
                sock=listening_socket,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=self._handshake_timeout,
            )
            for listening_socket in sockets
        ]
        self.started = True


def listening(config: ServeConfig) -> socket.socket:
    """Return a socket that listens at ``serve.host``. Raises UserError."""
    return listening_at(
        config.host, config.port, f"serve.host={config.host} serve.port={config.port}"
    )


@contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """Set ``stop`` on SIGINT or SIGTERM; a second signal ends the process at once."""
    loop = asyncio.get_running_loop()

    def receive(signum: int, frame: Any) -> None:
        if stop.is_set():
            os._exit(128 + signum)
        loop.call_soon_threadsafe(stop.set)

    before = {signum: signal.signal(signum, receive) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)

"""What all connections of a server share: the policy, its queue, limits, and counters."""

from __future__ import annotations

import asyncio
import itertools
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.requests import HTTPConnection

from rlinf_vla.config.serve import ServeConfig
from rlinf_vla.features.serving.array_messages import Limits, MessageError
from rlinf_vla.features.serving.batcher import Batcher, Busy
from rlinf_vla.features.serving.metrics import Metrics
from rlinf_vla.features.serving.observations import Request
from rlinf_vla.features.serving.service import Answer, PolicyService

T = TypeVar("T")
READERS = 2
"""Threads that decode messages, so that a large one does not delay the others."""

SHORT = 1 << 14
"""Bytes of a message that is decoded at once, unless it holds image files, which may be large."""
FILES = (b"__image__", b"base64")


class Refusal(Exception):
    """What a client is told, in one line, instead of an answer."""

    MISTAKE, BUSY, INTERNAL = "mistake", "busy", "internal"

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(" ".join(text.split()))
        self.kind = kind


def address_of(connection: HTTPConnection) -> str:
    """Return the address, without port, by which clients are told apart; "" if unknown."""
    return connection.client.host if connection.client is not None else ""


def internal(error: Exception) -> Refusal:
    """Return what a client is told of our own mistake, which is written to the log."""
    traceback.print_exception(error)
    return Refusal(
        Refusal.INTERNAL, f"internal error: {type(error).__name__}; the server's log says more"
    )


class State:
    """Shared by the connections of one server. ``ready``: the policy has acted once."""

    def __init__(self, config: ServeConfig, token: str | None) -> None:
        self.config = config
        self.token = token
        self.limits = Limits(size=config.max_message_bytes)
        self.ready = asyncio.Event()
        self.draining = asyncio.Event()
        self.metrics = Metrics()
        self.working = 0
        """Messages that are being answered."""
        self.sessions = 0
        """Open websockets."""
        self._numbers = itertools.count()
        self._readers = ThreadPoolExecutor(READERS, "serve-reader")
        self._service: PolicyService | None = None
        self._batcher: Batcher | None = None
        self._calls: asyncio.Task[None] | None = None

    @property
    def service(self) -> PolicyService:
        assert self._service is not None, "after ready"
        return self._service

    def open(self, service: PolicyService, thread: ThreadPoolExecutor) -> None:
        """Begin to answer with ``service``, in ``thread``."""
        config = self.config
        rows = service.defaults.most_rows
        clients = lambda: max(self.sessions, self.working)  # noqa: E731
        self._batcher = Batcher(
            service.answer,
            thread,
            rows,
            config.max_wait_ms / 1e3,
            config.max_queue,
            clients,
            self.metrics.rows.observe,
        )
        self.metrics.queue.set_function(self._batcher.__len__)
        self._service = service
        self._calls = asyncio.create_task(self._batcher.run())
        self.ready.set()

    async def close(self) -> None:
        if self._calls is not None:
            self._calls.cancel()
            await asyncio.wait([self._calls])
        self._readers.shutdown(cancel_futures=True)

    def number(self) -> int:
        """Return a new number: the noise seed of a session without keys of its own."""
        return next(self._numbers)

    @contextmanager
    def session(self) -> Iterator[None]:
        self.sessions += 1
        self.metrics.sessions.set(self.sessions)
        try:
            yield
        finally:
            self.sessions -= 1
            self.metrics.sessions.set(self.sessions)

    async def read(self, data: bytes | str, work: Callable[[], T]) -> T:
        """Run ``work``, which decodes ``data`` (text is refused): at once if that is quick, else in
        a thread.

        Most malformed messages are short. A change of threads would cost more than to refuse them,
        and a thread that acts waits for Python's lock at each change.
        """
        if isinstance(data, str) or (
            len(data) <= SHORT and not any(mark in data for mark in FILES)
        ):
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    async def infer(
        self, dialect: str, client: str, data: bytes | str, request: Callable[[], Request]
    ) -> Answer:
        """Return the answer to the ``request`` in the ``data`` of ``client``. Raises Refusal."""
        began = time.perf_counter()
        outcome = "cancelled"
        self.working += 1
        try:
            if self.draining.is_set() or self._batcher is None:
                raise Busy(
                    "the server is stopping"
                    if self.draining.is_set()
                    else "the policy is being loaded"
                )
            answer = await self._batcher.ask(await self.read(data, request), client)
            outcome = "ok"
            return answer
        except MessageError as error:
            outcome = Refusal.MISTAKE
            raise Refusal(outcome, str(error)) from None
        except Busy as error:
            outcome = Refusal.BUSY
            raise Refusal(outcome, f"busy: {error}: try again later") from None
        except Exception as error:
            outcome = Refusal.INTERNAL
            raise internal(error) from None
        finally:
            self.working -= 1
            self.metrics.requests.labels(dialect, outcome).inc()
            if outcome == "ok":
                self.metrics.seconds.labels(dialect).observe(time.perf_counter() - began)

    def described(self) -> dict[str, Any]:
        """Return the metadata of our own clients."""
        from rlinf_vla import __version__

        return {"version": __version__} | self.service.metadata

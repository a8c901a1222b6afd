"""Queue requests of all clients, and join them to policy calls in a thread of their own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass

from rlinf_vla.serving.observations import Request
from rlinf_vla.serving.service import Answer, Outcome


class Busy(Exception):
    """The queue is full, or the server is stopping: the same request may succeed later."""


@dataclass(eq=False)
class _Waiting:
    request: Request
    future: asyncio.Future[Answer]
    since: float


class Batcher:
    """Joins requests up to ``most_rows`` rows; a request that is ``alone`` is a call of its own.

    The first of a call waits for others, at most ``max_wait`` seconds after it came, and only while
    fewer requests wait than there are ``clients``. A request whose ``ask`` was cancelled is dropped
    unless its call has begun.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[Request]], list[Outcome]],
        thread: Executor,
        most_rows: int,
        max_wait: float,
        max_queue: int,
        clients: Callable[[], int],
        on_call: Callable[[int], None] = lambda rows: None,
    ) -> None:
        """``answer`` runs in ``thread``, one call at a time. ``on_call`` is told its rows."""
        self._answer, self._thread, self._clients, self._on_call = answer, thread, clients, on_call
        self._most_rows, self._max_wait, self._max_queue = most_rows, max_wait, max_queue
        self._queue: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._queue)

    async def ask(self, request: Request) -> Answer:
        """Return the answer. Raises Busy, MessageError, or what the policy raised."""
        if len(self._queue) >= self._max_queue:
            raise Busy(f"{len(self._queue)} requests are waiting already")
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request, loop.create_future(), loop.time())
        self._queue.append(waiting)
        self._arrived.set()
        try:
            return await waiting.future
        finally:
            if waiting in self._queue:
                self._queue.remove(waiting)

    async def run(self) -> None:
        """Make policy calls until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            taken = await self._next()
            self._on_call(sum(each.request.rows for each in taken))
            requests = [each.request for each in taken]
            try:
                outcomes = await loop.run_in_executor(self._thread, self._answer, requests)
            except Exception as error:  # of the service itself: the clients are told, and the next call is made
                outcomes = [error] * len(taken)
            for each, outcome in zip(taken, outcomes, strict=True):
                if each.future.done():  # its client has left
                    continue
                if isinstance(outcome, Exception):
                    each.future.set_exception(outcome)
                else:
                    each.future.set_result(outcome)

    async def _next(self) -> list[_Waiting]:
        """Wait for requests, and take those of the next call from the queue, in order."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            first = self._queue[0]
            left = first.since + self._max_wait - loop.time()
            if left <= 0 or first.request.alone or len(self._queue) >= self._clients() or len(self._joined()) < len(self._queue):
                return self._take()
            self._arrived.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), left)

    def _joined(self) -> list[_Waiting]:
        """Return those that the first in the queue would take along."""
        first, rows = self._queue[0], 0
        found = []
        for each in self._queue:
            fits = rows + each.request.rows <= self._most_rows and not each.request.alone
            if each is first or (fits and not first.request.alone):
                found.append(each)
                rows += each.request.rows
        return found

    def _take(self) -> list[_Waiting]:
        found = self._joined()
        for each in found:
            self._queue.remove(each)
        return found

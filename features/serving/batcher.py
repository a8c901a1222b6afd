"""Queue requests of all clients, and join them to policy calls in a thread of their own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass

from rlinf_vla.features.serving.observations import Request
from rlinf_vla.features.serving.service import Answer, Outcome


class Busy(Exception):
    """The queue is full, or the server is stopping: the same request may succeed later."""


@dataclass(eq=False)
class _Waiting:
    request: Request
    client: str
    future: asyncio.Future[Answer]
    since: float


class Batcher:
    """Joins requests up to ``most_rows`` rows; a request that is ``alone`` is a call of its own.

    The first of a call waits for others, at most ``max_wait`` seconds after it came, and only while
    fewer requests wait than there are ``clients``. A request whose ``ask`` was cancelled is dropped
    unless its call has begun.

    Clients take turns: the first request of each comes before the second of any, and of two clients
    comes first the one that was not served for longer. A full queue refuses requests of whom most
    wait.
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
        self._answer = answer
        self._thread = thread
        self._clients = clients
        self._on_call = on_call
        self._most_rows = most_rows
        self._max_wait = max_wait
        self._max_queue = max_queue
        self._queue: list[_Waiting] = []
        """In the order of arrival."""
        self._turns: dict[str, int] = {}
        """Client -> number of its last request that was served, the oldest first."""
        self._served = 0
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._queue)

    async def ask(self, request: Request, client: str = "") -> Answer:
        """Return the answer to a request of ``client``, any text that tells clients apart.

        Raises Busy, MessageError, or what the policy raised.
        """
        if len(self._queue) >= self._max_queue:
            self._make_room(client)
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request, client, loop.create_future(), loop.time())
        self._queue.append(waiting)
        self._arrived.set()
        try:
            return await waiting.future
        finally:
            if waiting in self._queue:
                self._queue.remove(waiting)

    def _make_room(self, client: str) -> None:
        """Refuse the newest request of whom most wait. Raises Busy if that is ``client`` itself."""
        busy = Busy(f"{len(self._queue)} requests are waiting already")
        counts = Counter(waiting.client for waiting in self._queue)
        greediest, most = counts.most_common(1)[0]
        if most <= counts[client] + 1:
            raise busy
        refused = next(waiting for waiting in reversed(self._queue) if waiting.client == greediest)
        self._queue.remove(refused)
        if not refused.future.done():
            refused.future.set_exception(busy)

    async def run(self) -> None:
        """Make policy calls until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._next()
            self._on_call(sum(waiting.request.rows for waiting in batch))
            requests = [waiting.request for waiting in batch]
            try:
                outcomes = await loop.run_in_executor(self._thread, self._answer, requests)
            except (
                Exception
            ) as error:  # of the service itself: the clients are told, and the next call is made
                outcomes = [error] * len(batch)
            for waiting, outcome in zip(batch, outcomes, strict=True):
                if waiting.future.done():  # its client has left
                    continue
                if isinstance(outcome, Exception):
                    waiting.future.set_exception(outcome)
                else:
                    waiting.future.set_result(outcome)

    async def _next(self) -> list[_Waiting]:
        """Wait for requests, and take those of the next call from the queue, in turn."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            first = self._in_turn()[0]
            left = first.since + self._max_wait - loop.time()
            if (
                left <= 0
                or first.request.alone
                or len(self._queue) >= self._clients()
                or len(self._joined()) < len(self._queue)
            ):
                return self._take()
            self._arrived.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), left)

    def _in_turn(self) -> list[_Waiting]:
        """Return the waiting requests in the order in which they are to be served."""
        before = Counter[str]()
        keys = dict[_Waiting, tuple[int, int]]()
        for waiting in self._queue:
            keys[waiting] = before[waiting.client], self._turns.get(waiting.client, 0)
            before[waiting.client] += 1
        return sorted(self._queue, key=lambda waiting: keys[waiting])

    def _joined(self) -> list[_Waiting]:
        """Return those that the first in turn would take along."""
        queue = self._in_turn()
        rows = 0
        first = queue[0]
        batch = []
        for waiting in queue:
            fits = rows + waiting.request.rows <= self._most_rows and not waiting.request.alone
            if waiting is first or (fits and not first.request.alone):
                batch.append(waiting)
                rows += waiting.request.rows
        return batch

    def _take(self) -> list[_Waiting]:
        batch = self._joined()
        for waiting in batch:
            self._queue.remove(waiting)
            self._served += 1
            self._turns.pop(waiting.client, None)
            self._turns[waiting.client] = self._served
        while len(self._turns) > self._max_queue:  # whoever is forgotten comes first
            del self._turns[next(iter(self._turns))]
        return batch

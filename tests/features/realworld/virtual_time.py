"""A clock that only sleeping advances, and inferences on it: exact and instant."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from rlinf_vla.features.realworld.clock import Clock
from rlinf_vla.features.realworld.inference import (
    Chunk,
    Infer,
    InferenceWorker,
    Request,
    Unanswered,
    answered,
)


class VirtualClock(Clock):
    """A clock that advances only during sleep, and then runs the scheduled events.

    Events run in order of their time, then of their scheduling.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._order = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def now(self) -> float:
        return self._now

    def at(self, moment: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(moment, self._now), self._order, event))
        self._order += 1

    def step(self, until: float) -> bool:
        """Advance to the next event due by ``until`` and run it.
        Without such an event, advance to ``until`` and return False."""
        if self._events and self._events[0][0] <= until:
            self._now, _, event = heapq.heappop(self._events)
            event()
            return True
        self._now = max(self._now, until)
        return False

    def sleep_until(self, moment: float) -> None:
        while self.step(moment):
            pass


class ScheduledInference(InferenceWorker):
    """Run inference on a virtual clock; each takes ``duration(request)`` seconds."""

    def __init__(
        self, infer: Infer, clock: VirtualClock, duration: Callable[[Request], float]
    ) -> None:
        self._infer = infer
        self._clock = clock
        self._duration = duration
        self._finished: list[Chunk | Unanswered] = []
        self._running: Request | None = None
        self._waiting: Request | None = None

    def pending(self) -> tuple[Request | None, Request | None]:
        return self._running, self._waiting

    def submit(self, request: Request) -> None:
        self._waiting = request
        self._begin()

    def withdraw(self) -> None:
        self._waiting = None

    def take(self) -> list[Chunk | Unanswered]:
        finished = self._finished
        self._finished = []
        return finished

    def wait(self, until: float) -> None:
        while not self._finished and self._clock.step(until):
            pass

    def settle(self, until: float) -> bool:
        self.withdraw()
        while self._running is not None and self._clock.step(until):
            pass
        return self._running is None

    def close(self) -> None:
        self.withdraw()

    def _begin(self) -> None:
        if self._running is None and self._waiting is not None:
            self._running = self._waiting
            self._waiting = None
            self._clock.at(self._clock.now() + self._duration(self._running), self._end)

    def _end(self) -> None:
        assert self._running is not None
        self._finished.append(answered(self._infer, self._running))
        self._running = None
        self._begin()

"""Clocks of a control loop: real monotonic time, or virtual time for exact and instant tests."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Return monotonic time in seconds from an arbitrary origin."""

    def sleep_until(self, moment: float) -> None:
        """Sleep until ``moment``: return at once if it has passed, and never early."""


class MonotonicClock:
    """``time.monotonic``: setting the wall clock has no effect."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            time.sleep(left)


class VirtualClock:
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

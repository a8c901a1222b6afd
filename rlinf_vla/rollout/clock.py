"""The time that a control loop keeps: the machine's, which no one can set, or a virtual one, on which tests are exact and instant."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some moment; never goes back."""

    def sleep_until(self, moment: float) -> None:
        """Returns at once where that is past, and never before it."""


class MonotonicClock:
    """``time.monotonic``: setting the wall clock changes nothing."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            time.sleep(left)


class VirtualClock:
    """Time passes only while someone sleeps; what is scheduled happens on the way, in order of its moment, then of its scheduling."""

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
        """Go to the next event that is due by ``until`` and let it happen; False: there is none, and it is ``until`` now."""
        if self._events and self._events[0][0] <= until:
            self._now, _, event = heapq.heappop(self._events)
            event()
            return True
        self._now = max(self._now, until)
        return False

    def sleep_until(self, moment: float) -> None:
        while self.step(moment):
            pass

"""Share calls out to workers of different speed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 0.97
"""Factor on the seconds expected of a worker that is free when no call waits: it is tried again."""

OLD = 0.5
"""Weight of earlier calls in the average seconds of a worker."""


class Turns:
    """The free workers of a pool, and the calls that wait for them.

    A free worker gets a call unless others, which are busy now, would have done all waiting calls
    earlier without it. A worker is expected to take as long as for its last calls of the method:
    calls are not quite of equal work. If they are, this is the shortest schedule.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._free: dict[int, Any] = {}
        """Place -> worker, the one that is free for the longest time first."""
        self._busy: dict[int, tuple[str, float]] = {}
        """Place -> method and start of its call."""
        self._seconds: dict[str, dict[int, float]] = {}
        """Method -> place -> average seconds of the last calls."""
        self._waiting = 0

    def expect(self, calls: int) -> None:
        """Count ``calls`` more that wait, or fewer if negative; ``take`` counts one fewer."""
        with self._changed:
            self._waiting += calls
            self._changed.notify_all()

    def add(self, place: int, worker: Any) -> None:
        """Make a worker free that has made no call before."""
        with self._changed:
            self._free[place] = worker
            self._changed.notify_all()

    def take(self, method: str, patience_s: float) -> tuple[int, Any] | None:
        """Return the place and worker for a waiting call; None: no worker within ``patience_s``."""
        with self._changed:
            place = self._chosen(method)
            if place is None:
                self._changed.wait(patience_s)
                place = self._chosen(method)
            if place is None:
                return None
            worker = self._free.pop(place)
            self._busy[place] = method, self._clock()
            self._waiting -= 1
            durations = self._seconds.get(method, {})
            if self._waiting <= 0:
                durations |= {
                    other: PATIENCE * durations[other] for other in self._free if other in durations
                }
            return place, worker

    def done(self, place: int, worker: Any, finished: bool = True) -> None:
        """Make a worker free after its call; ``finished``: the call's time tells its speed."""
        with self._changed:
            method, started = self._busy.pop(place)
            if finished:
                durations = self._seconds.setdefault(method, {})
                seconds = self._clock() - started
                durations[place] = seconds + OLD * (durations.get(place, seconds) - seconds)
            self._free[place] = worker
            self._changed.notify_all()

    def forget(self, place: int) -> None:
        """Forget a busy worker that is lost."""
        with self._changed:
            self._busy.pop(place, None)
            for durations in self._seconds.values():
                durations.pop(place, None)
            self._changed.notify_all()

    def _chosen(self, method: str) -> int | None:
        if not self._free:
            return None
        durations = self._seconds.get(method, {})
        now = self._clock()
        if any(place not in durations for place in (*self._free, *self._busy)):
            return next(iter(self._free))
        ends = dict.fromkeys(self._free, 0.0) | {
            place: self._left(place, now) for place in self._busy
        }
        for _ in range(max(1, self._waiting)):
            best = min(ends, key=lambda place: ends[place] + durations[place])
            if best in self._free:
                return best
            ends[best] += durations[best]
        return None

    def _left(self, place: int, now: float) -> float:
        """Seconds until a busy worker is free; if it is late, as many as it is late by."""
        method, started = self._busy[place]
        usual = self._seconds.get(method, {}).get(place, 0.0)
        elapsed = now - started
        return abs(usual - elapsed)

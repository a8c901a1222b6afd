"""Measure how fast the arm's clock runs: a simulated second is longer on a slow machine."""

from __future__ import annotations

from collections import deque

WINDOW_S = 2.0
LEAST_S = 0.5
"""Shortest time from which a pace is computed."""


class Pace:
    """Seconds of the arm's clock per second of this machine's, over the last WINDOW_S."""

    def __init__(self) -> None:
        self.value = 1.0
        """1 until LEAST_S have been seen."""
        self._seen: deque[tuple[float, float]] = deque()

    def see(self, now: float, clock: float) -> None:
        """Take one reading of both clocks, in seconds."""
        self._seen.append((now, clock))
        while now - self._seen[0][0] > WINDOW_S and len(self._seen) > 2:
            self._seen.popleft()
        since, then = self._seen[0]
        if now - since >= LEAST_S:
            self.value = max(clock - then, 0.0) / (now - since)

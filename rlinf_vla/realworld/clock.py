"""The clock of a control loop, which a test may replace by virtual time."""

from __future__ import annotations

import time
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

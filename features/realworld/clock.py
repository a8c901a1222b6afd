"""The clock of a control loop, which tests replace by virtual time."""

from __future__ import annotations

import time


class Clock:
    """``time.monotonic``, in seconds: setting the wall clock has no effect."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, moment: float) -> None:
        """Sleep until ``moment``: return at once if it has passed, and never early."""
        while (left := moment - time.monotonic()) > 0:
            time.sleep(left)

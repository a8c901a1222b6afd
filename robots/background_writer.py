"""Run disk writes in order in a thread: a busy disk may block for a second, a servo cannot."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Work = Callable[[], object]
Disk = Callable[[Work], None]
"""Runs the work now or soon."""


def at_once(work: Work) -> None:
    work()


class BackgroundWriter:
    """Implements ``Disk`` with a thread."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """The last write error, or None."""
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="disk", daemon=True).start()

    def __call__(self, work: Work) -> None:
        self._work.put(work)

    def settle(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for all work so far; return whether every write succeeded."""
        done = threading.Event()
        self(done.set)
        return done.wait(seconds) and self.problem is None

    def close(self) -> None:
        """End the thread after all work so far. No work may be added afterwards."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except OSError as error:
                self.problem = f"disk: {error.strerror or error}; faults and the journal cannot be written"

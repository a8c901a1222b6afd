"""What is to be on the disk, written in order by a thread: a servo does not wait for a disk, which may take a second when others use it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Work = Callable[[], object]
Disk = Callable[[Work], None]
"""Does it, now or soon."""


def at_once(work: Work) -> None:
    work()


class Later:
    def __init__(self) -> None:
        self.problem: str | None = None
        """Why something is not on the disk."""
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="disk", daemon=True).start()

    def __call__(self, work: Work) -> None:
        self._work.put(work)

    def settle(self, seconds: float) -> bool:
        """Whether all until now is on the disk, which may take so many seconds."""
        done = threading.Event()
        self(done.set)
        return done.wait(seconds) and self.problem is None

    def close(self) -> None:
        """The thread ends when all until now is on the disk. Nothing may be asked of it afterwards."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except OSError as error:
                self.problem = f"disk: {error.strerror or error}, so that nothing is kept of what the arm does"

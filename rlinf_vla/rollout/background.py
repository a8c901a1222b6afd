"""Inference beside a control loop: one request is worked on, one may wait, and a newer one takes the place of the one that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from rlinf_vla.rollout.chunks import Chunk, Request
from rlinf_vla.rollout.clock import Clock, VirtualClock

Infer = Callable[[Request], Chunk]


class Background(Protocol):
    def pending(self) -> tuple[Request | None, Request | None]:
        """What is worked on, and what waits."""

    def submit(self, request: Request) -> None:
        """Work on it next, in place of what waits."""

    def withdraw(self) -> None:
        """Nothing waits any more; what is worked on goes on."""

    def take(self) -> list[Chunk]:
        """What was finished since the last call, oldest first. Raises what the inference raised."""

    def wait(self, until: float) -> None:
        """Returns when there is something to take, and no later than ``until``."""

    def settle(self, until: float) -> bool:
        """Withdraw, and wait until nothing is worked on: weights may change then. False: it took too long."""

    def close(self) -> None: ...


class Threaded:
    """In a thread of this process; PyTorch leaves the interpreter free while it computes."""

    def __init__(self, infer: Infer, clock: Clock) -> None:
        self._infer, self._clock = infer, clock
        self._changed = threading.Condition()
        self._finished: list[Chunk] = []
        self._error: BaseException | None = None
        self._closed = False
        self._running: Request | None = None
        self._waiting: Request | None = None
        threading.Thread(target=self._work, name="inference", daemon=True).start()

    def pending(self) -> tuple[Request | None, Request | None]:
        with self._changed:
            return self._running, self._waiting

    def submit(self, request: Request) -> None:
        with self._changed:
            self._waiting = request
            self._changed.notify_all()

    def withdraw(self) -> None:
        with self._changed:
            self._waiting = None

    def take(self) -> list[Chunk]:
        with self._changed:
            if self._error is not None:
                raise self._error
            finished, self._finished = self._finished, []
            return finished

    def wait(self, until: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._error, max(0.0, until - self._clock.now()))

    def settle(self, until: float) -> bool:
        self.withdraw()
        with self._changed:
            return self._changed.wait_for(lambda: self._running is None, max(0.0, until - self._clock.now()))

    def close(self) -> None:
        """An inference under way is left to itself."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                self._running, self._waiting = self._waiting, None
            assert self._running is not None
            try:
                finished, error = [self._infer(self._running)], None
            except BaseException as raised:  # the loop stops the arm, and raises it again
                finished, error = [], raised
            with self._changed:
                self._finished += finished
                self._error, self._running = error, None
                self._changed.notify_all()
                if error is not None:
                    return


class Scheduled:
    """On a virtual clock: an inference is over so many seconds after it began as ``duration`` says of its request."""

    def __init__(self, infer: Infer, clock: VirtualClock, duration: Callable[[Request], float]) -> None:
        self._infer, self._clock, self._duration = infer, clock, duration
        self._finished: list[Chunk] = []
        self._running: Request | None = None
        self._waiting: Request | None = None

    def pending(self) -> tuple[Request | None, Request | None]:
        return self._running, self._waiting

    def submit(self, request: Request) -> None:
        self._waiting = request
        self._begin()

    def withdraw(self) -> None:
        self._waiting = None

    def take(self) -> list[Chunk]:
        finished, self._finished = self._finished, []
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
            self._running, self._waiting = self._waiting, None
            self._clock.at(self._clock.now() + self._duration(self._running), self._end)

    def _end(self) -> None:
        assert self._running is not None
        self._finished.append(self._infer(self._running))
        self._running = None
        self._begin()

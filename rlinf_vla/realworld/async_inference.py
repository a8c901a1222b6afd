"""Run inference beside a control loop: one request runs, one waits, and a newer one replaces it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from rlinf_vla.realworld.chunks import Chunk, Request
from rlinf_vla.realworld.clock import Clock, VirtualClock

Infer = Callable[[Request], Chunk]


class InferenceWorker(Protocol):
    def pending(self) -> tuple[Request | None, Request | None]:
        """Return the running and the waiting request."""

    def submit(self, request: Request) -> None:
        """Run this request next, in place of the waiting one."""

    def withdraw(self) -> None:
        """Drop the waiting request; the running one continues."""

    def take(self) -> list[Chunk]:
        """Return newly finished chunks, oldest first. Raises what the inference raised."""

    def wait(self, until: float) -> None:
        """Return when a chunk can be taken, or at ``until`` at the latest."""

    def settle(self, until: float) -> bool:
        """Drop the waiting request and wait until none runs, so that weights may change.

        Returns False on timeout.
        """

    def close(self) -> None: ...


class ThreadedInference:
    """Run inference in a thread of this process; PyTorch releases the interpreter lock."""

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
        """Stop the thread; a running inference is not interrupted."""
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
            except BaseException as raised:  # the control loop stops the arm and raises it again
                finished, error = [], raised
            with self._changed:
                self._finished += finished
                self._error, self._running = error, None
                self._changed.notify_all()
                if error is not None:
                    return


class ScheduledInference:
    """Run inference on a virtual clock; each takes ``duration(request)`` seconds."""

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

"""Infer action chunks beside the control loop, and choose each step's action from them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.config.errors import Failure
from rlinf_vla.features.realworld.clock import Clock
from rlinf_vla.features.realworld.sensing import Reading

Actions = NDArray[np.float32]

SUPERSEDED, TOO_OLD, SPENT = "superseded", "too_old", "spent"
REJECTIONS = (SUPERSEDED, TOO_OLD, SPENT)
"""Why a chunk is rejected.
SUPERSEDED: a newer observation has acted, or its context is over (pause, new episode). TOO_OLD: its
observation exceeds the age limit. SPENT: all its actions are for past steps."""

DELAYS = 10
"""Recent delays, in ticks; the longest predicts the next (Black et al. 2025, algorithm 1)."""


@dataclass(frozen=True)
class Committed:
    """Actions that the arm executes while a policy infers the next chunk.
    actions: float32 ``[N, D]``, from the observation's own step on. frozen: number of them executed
    before the new chunk arrives."""

    actions: Actions
    frozen: int


@dataclass(frozen=True)
class Request:
    """An inference request. step: control steps executed so far; the chunk starts at the next one.
    tick: control periods of this run so far, including those in which the arm was held."""

    seen: Reading
    instruction: str
    step: int
    tick: int
    committed: Committed | None = None


@dataclass(frozen=True)
class Chunk:
    """Actions of one inference: float32 ``[C, D]``. sections: seconds taken by each part of it.

    chosen: what an off-policy actor chose instead of actions (float32, any shape); None: the
    actions themselves.
    """

    request: Request
    actions: Actions
    sections: dict[str, float] = field(default_factory=dict)
    chosen: Actions | None = None


class Unanswered(Exception):
    """There is no chunk for ``request``, for instance because the policy's server is lost; a later
    request may get one. In one line."""

    def __init__(self, request: Request, reason: str) -> None:
        super().__init__(reason)
        self.request = request


@dataclass(frozen=True)
class Chosen:
    """An action ``[D]``, its chunk and position there, and the observation's age in seconds."""

    action: Actions
    chunk: Chunk
    position: int
    age: float


class ChunkQueue:
    """Hold the chunk under execution and decide which chunks replace it.

    Action ``i`` of a chunk is for the ``i``-th control step executed after its observation,
    whichever chunk supplied the steps before. A new chunk therefore starts at the position given by
    the steps executed since its observation. Steps in which the arm was held do not count.
    """

    def __init__(self, max_age: float) -> None:
        self._max_age = max_age
        self._current: Chunk | None = None
        self._oldest = 0
        self._delays: deque[int] = deque(maxlen=DELAYS)

    def offer(self, chunk: Chunk, now: float, step: int, tick: int) -> str | None:
        """Execute ``chunk`` from now on, or return the reason (REJECTIONS) why not.
        ``step``: control steps executed so far."""
        seen = chunk.request.seen
        if self.supersedes(chunk.request):
            return SUPERSEDED
        self.took(tick - chunk.request.tick)
        if now - seen.time > self._max_age:
            return TOO_OLD
        if step - chunk.request.step >= len(chunk.actions):
            return SPENT
        self._current = chunk
        self._oldest = seen.number + 1
        return None

    def supersedes(self, request: Request) -> bool:
        """Whether a newer observation has acted, or the request is of an earlier run."""
        return request.seen.number < self._oldest

    def next(self, now: float, step: int) -> Chosen | None:
        """Return the action of this step; None if there is none or its observation is too old."""
        if self._current is None:
            return None
        position = step - self._current.request.step
        age = now - self._current.request.seen.time
        if position >= len(self._current.actions) or age > self._max_age:
            return None
        return Chosen(self._current.actions[position], self._current, position, age)

    def forget(self, before: int) -> None:
        """Drop the current chunk, and reject observations with a number below ``before``."""
        self._current = None
        self._oldest = max(self._oldest, before)

    def took(self, ticks: int) -> None:
        """Record the ticks between an observation and its chunk."""
        self._delays.append(ticks)

    def committed(self, step: int) -> Committed | None:
        """Return the remaining actions for a policy that continues them; None if none remain."""
        if self._current is None:
            return None
        left = self._current.actions[step - self._current.request.step :]
        return Committed(left, min(max(self._delays, default=1), len(left))) if len(left) else None


Infer = Callable[[Request], Chunk]


def answered(infer: Infer, request: Request) -> Chunk | Unanswered:
    """Return the chunk, or the Failure of this request. Raises what else the inference raises."""
    try:
        return infer(request)
    except Failure as failure:
        return Unanswered(request, str(failure))


class InferenceWorker:
    """Run inference in threads; PyTorch releases the interpreter lock.

    At most ``in_flight`` requests run and one waits, and a newer one replaces that.
    """

    def __init__(self, infer: Infer, clock: Clock, in_flight: int = 1) -> None:
        self._infer = infer
        self._clock = clock
        self._changed = threading.Condition()
        self._finished: list[Chunk | Unanswered] = []
        self._error: BaseException | None = None
        self._closed = False
        self._begun: list[Request] = []
        self._waiting: Request | None = None
        for _ in range(in_flight):
            threading.Thread(target=self._work, name="inference", daemon=True).start()

    def pending(self) -> tuple[Request | None, Request | None]:
        """Return the newest running request and the waiting one."""
        with self._changed:
            return self._begun[-1] if self._begun else None, self._waiting

    def submit(self, request: Request) -> None:
        """Run this request next, in place of the waiting one."""
        with self._changed:
            self._waiting = request
            self._changed.notify_all()

    def withdraw(self) -> None:
        """Drop the waiting request; the running ones continue."""
        with self._changed:
            self._waiting = None

    def take(self) -> list[Chunk | Unanswered]:
        """Return what newly finished, oldest first.

        Raises what the inference raised, but Failure.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            finished = self._finished
            self._finished = []
            return finished

    def wait(self, until: float) -> None:
        """Return when something can be taken, or at ``until`` at the latest."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._finished or self._error, max(0.0, until - self._clock.now())
            )

    def settle(self, until: float) -> bool:
        """Drop the waiting request and wait until none runs, so that weights may change.

        Returns False on timeout.
        """
        self.withdraw()
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._begun, max(0.0, until - self._clock.now())
            )

    def close(self) -> None:
        """Stop the threads; a running inference is not interrupted."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                request = self._waiting
                self._waiting = None
                assert request is not None
                self._begun.append(request)
            try:
                finished = [answered(self._infer, request)]
                error = None
            except BaseException as raised:  # the control loop stops the arm and raises it again
                finished = []
                error = raised
            with self._changed:
                self._finished += finished
                self._error = self._error or error
                self._begun = [begun for begun in self._begun if begun is not request]
                self._changed.notify_all()
                if error is not None:
                    return

"""Which action is executed now, of chunks that a policy decides in the background, each from an observation that is past by then."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.rollout.sensing import Seen

Actions = NDArray[np.float32]

SUPERSEDED, TOO_OLD, SPENT = "superseded", "too_old", "spent"
REJECTIONS = (SUPERSEDED, TOO_OLD, SPENT)
"""Why a chunk is not executed: a newer observation has acted, or what it was decided for is over (a pause, another episode); its
observation is older than the limit; all of its actions belong to steps that are past."""

DELAYS = 10
"""Latest chunks of which the slowest says how long the next will take (Black et al. 2025, algorithm 1)."""


@dataclass(frozen=True)
class Committed:
    """What the arm will go on doing while a policy infers. actions: float32 ``[N, D]``, the first that of the observation's own step;
    frozen: so many of them will have been executed when the new chunk comes."""

    actions: Actions
    frozen: int


@dataclass(frozen=True)
class Request:
    """What a policy is to decide. step: control steps executed so far; the chunk's first action is for the next. tick: periods of this
    run so far, in which the arm may have been held, too."""

    seen: Seen
    instruction: str
    step: int
    tick: int
    committed: Committed | None = None


@dataclass(frozen=True)
class Chunk:
    """actions: float32 ``[C, D]``. sections: seconds that parts of the inference took. sample: whatever the policy's side wants to keep."""

    request: Request
    actions: Actions
    sections: dict[str, float] = field(default_factory=dict)
    sample: Any = None


@dataclass(frozen=True)
class Chosen:
    """An action ``[D]``, the chunk it is of, its place there, and the seconds since that chunk's observation."""

    action: Actions
    chunk: Chunk
    position: int
    age: float


class ChunkQueue:
    """The chunk that is being executed, and who may replace it.

    Action ``i`` of a chunk is for the ``i``-th control step executed after its observation, whichever chunk the steps before were of: so a
    new chunk takes over at the place that the time since its observation corresponds to. Steps in which the arm was held do not count.
    """

    def __init__(self, max_age: float) -> None:
        self._max_age = max_age
        self._current: Chunk | None = None
        self._oldest = 0
        self._delays: deque[int] = deque(maxlen=DELAYS)

    def offer(self, chunk: Chunk, now: float, step: int, tick: int) -> str | None:
        """Execute ``chunk`` from here on, ``step`` control steps having been executed; or say why not: one of REJECTIONS."""
        seen = chunk.request.seen
        if seen.number < self._oldest:
            return SUPERSEDED
        self.took(tick - chunk.request.tick)
        if now - seen.time > self._max_age:
            return TOO_OLD
        if step - chunk.request.step >= len(chunk.actions):
            return SPENT
        self._current, self._oldest = chunk, seen.number + 1
        return None

    def next(self, now: float, step: int) -> Chosen | None:
        """The action of this step; None where no chunk has one, or its observation is too old by now."""
        if self._current is None:
            return None
        position, age = step - self._current.request.step, now - self._current.request.seen.time
        if position >= len(self._current.actions) or age > self._max_age:
            return None
        return Chosen(self._current.actions[position], self._current, position, age)

    def forget(self, before: int) -> None:
        """Nothing that was observed before that number will act any more."""
        self._current, self._oldest = None, max(self._oldest, before)

    def took(self, ticks: int) -> None:
        """From an observation to its chunk."""
        self._delays.append(ticks)

    def committed(self, step: int) -> Committed | None:
        """For a policy that acts onto what is under way; None where nothing is."""
        if self._current is None:
            return None
        left = self._current.actions[step - self._current.request.step :]
        return Committed(left, min(max(self._delays, default=1), len(left))) if len(left) else None

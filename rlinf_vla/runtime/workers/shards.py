"""Shards of rollouts that workers are still producing, and what they are divided into."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from typing import Any, TypeVar

from rlinf_vla.core.types import Episodes, Trajectory

_LOOK = 0.1
"""Seconds between checks whether the run is to end."""

Parts = TypeVar("Parts", range, Episodes)


@dataclass(frozen=True)
class Task:
    """A shard to roll out: rollout worker's method, iteration, policy version and arguments."""

    method: str
    iteration: int
    version: int
    arguments: tuple[Any, ...]


class Shards:
    """Pending shards in a fixed order; iterating waits for each (for all without ``streaming``)."""

    def __init__(
        self,
        items: Sequence[tuple[Task, Future[Trajectory]]],
        streaming: bool,
        look: Callable[[float], None],
    ) -> None:
        self.items = items
        self._streaming = streaming
        self._look = look

    def __iter__(self) -> Iterator[Trajectory]:
        if not self._streaming:
            for _, future in self.items:
                self._result(future)
        for _, future in self.items:
            yield self._result(future)

    def _result(self, future: Future[Trajectory]) -> Trajectory:
        while True:
            self._look(sum(each.done() for _, each in self.items) / len(self.items))
            try:
                return future.result(timeout=_LOOK)
            except NotYet:
                if future.done():  # a TimeoutError of the work itself
                    raise


def parts(items: Parts, size: int) -> list[Parts]:
    """Return ``items`` in parts of at most ``size``."""
    return [items[first : first + size] for first in range(0, len(items), size)]

"""Selection of the executed action, in a table of cases."""

from __future__ import annotations

import numpy as np
import pytest

from rlinf_vla.features.realworld.inference import (
    DELAYS,
    SPENT,
    SUPERSEDED,
    TOO_OLD,
    Chunk,
    ChunkQueue,
    Request,
)
from rlinf_vla.features.realworld.robot import ToolPose, ToolState
from rlinf_vla.features.realworld.sensing import Reading

MAX_AGE = 1.0


def chunk(number: int, step: int, length: int = 3, time: float = 0.0, tick: int = 0) -> Chunk:
    """Actions 10 number + 0, 1, 2 ..."""
    standing = ToolPose(np.zeros(3), np.array([1.0, 0, 0, 0]))
    seen = Reading(
        number, ToolState(time, np.zeros(7), np.zeros(7), standing, np.zeros(6), 0.0), {}
    )
    actions = (10 * number + np.arange(length, dtype=np.float32))[:, None]
    return Chunk(Request(seen, "go", step, tick), actions)


def executed(queue: ChunkQueue, step: int, now: float = 0.0) -> float | None:
    chosen = queue.next(now, step)
    return None if chosen is None else float(chosen.action[0])


@pytest.mark.parametrize(("late", "said"), [(0, None), (2, None), (3, SPENT), (4, SPENT)])
def test_a_chunk_takes_over_at_the_index_of_the_present_step(late: int, said: str | None) -> None:
    queue = ChunkQueue(MAX_AGE)
    assert queue.offer(chunk(1, step=5), 0.0, 5 + late, late) == said
    assert executed(queue, 5 + late) == (None if said else 10 + late)
    assert executed(queue, 8) is None, "after its last action there is none"


@pytest.mark.parametrize(("age", "said"), [(0.5, None), (1.0, None), (1.01, TOO_OLD)])
def test_observations_that_are_too_old_do_not_act(age: float, said: str | None) -> None:
    assert ChunkQueue(MAX_AGE).offer(chunk(1, 0), age, 0, 0) == said
    queue = ChunkQueue(MAX_AGE)
    queue.offer(chunk(1, 0), 0.0, 0, 0)
    assert executed(queue, 1, now=age) == (None if said else 11)


def test_only_newer_observations_take_over() -> None:
    queue = ChunkQueue(MAX_AGE)
    assert queue.offer(chunk(2, 0), 0.0, 0, 0) is None
    assert queue.offer(chunk(1, 0), 0.0, 1, 1) == queue.offer(chunk(2, 0), 0.0, 1, 1) == SUPERSEDED
    assert executed(queue, 1) == 21
    assert queue.offer(chunk(3, 1), 0.0, 1, 1) is None and executed(queue, 1) == 30


def test_a_discarded_chunk_does_not_return() -> None:
    queue = ChunkQueue(MAX_AGE)
    queue.offer(chunk(2, 0), 0.0, 0, 0)
    queue.forget(5)
    assert executed(queue, 1) is None and queue.committed(1) is None
    assert queue.offer(chunk(4, 0), 0.0, 1, 1) == SUPERSEDED
    queue.forget(3)
    assert queue.offer(chunk(4, 0), 0.0, 1, 1) == SUPERSEDED, "an earlier number discards as much"
    assert queue.offer(chunk(5, 0), 0.0, 1, 1) is None


def test_the_slowest_of_the_latest_inferences_sets_the_frozen_actions() -> None:
    queue = ChunkQueue(MAX_AGE)
    assert queue.committed(0) is None
    queue.offer(chunk(1, 0, length=12), 0.0, 0, 0)
    for delay in (1, 4, 2):
        queue.took(delay)
    found = queue.committed(3)
    assert (
        found is not None
        and found.actions[:, 0].tolist() == [10 + i for i in range(3, 12)]
        and found.frozen == 4
    )
    last = queue.committed(10)
    assert last is not None and last.frozen == 2, "no more than there are"
    assert queue.committed(12) is None
    for _ in range(DELAYS):
        queue.took(1)
    assert (again := queue.committed(3)) is not None and again.frozen == 1, (
        "older ones do not count"
    )

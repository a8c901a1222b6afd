"""Inference threads, tested by events instead of times; the same rules on a virtual clock."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rlinf_vla.config.errors import Failure
from rlinf_vla.features.realworld.clock import Clock
from rlinf_vla.features.realworld.inference import (
    REJECTIONS,
    SPENT,
    SUPERSEDED,
    TOO_OLD,
    Chunk,
    ChunkQueue,
    InferenceWorker,
    Request,
    Unanswered,
)
from rlinf_vla.features.realworld.robot import ToolPose, ToolState
from rlinf_vla.features.realworld.sensing import Reading
from tests.features.realworld.virtual_time import ScheduledInference, VirtualClock

LONG = 120.0
"""Seconds that only bound a hang."""


def request(number: int, step: int = 0, time: float = 0.0, tick: int = 0) -> Request:
    pose = ToolPose(np.zeros(3), np.array([1.0, 0, 0, 0]))
    return Request(
        Reading(number, ToolState(time, np.zeros(7), np.zeros(7), pose, np.zeros(6), 0.0), {}),
        "",
        step,
        tick,
    )


def chunk(number: int, step: int = 0, time: float = 0.0, tick: int = 0, length: int = 4) -> Chunk:
    return Chunk(
        request(number, step, time, tick),
        np.arange(4 * length, dtype=np.float32).reshape(length, 4),
    )


class Gate:
    """An inference that ends when it is released."""

    def __init__(self) -> None:
        self.began = threading.Semaphore(0)
        self.let = threading.Semaphore(0)

    def __call__(self, asked: Request) -> Chunk:
        self.began.release()
        assert self.let.acquire(timeout=LONG)
        return Chunk(asked, np.zeros((1, 4), np.float32))


def test_the_latest_request_replaces_the_waiting_one() -> None:
    gate, clock = Gate(), Clock()
    background = InferenceWorker(gate, clock)
    first, second, third = map(request, range(3))
    background.submit(first)
    assert gate.began.acquire(timeout=LONG)
    background.submit(second)
    background.submit(third)
    assert background.pending() == (first, third)
    background.wait(clock.now() + 0.01)
    assert background.take() == []
    gate.let.release(2)
    background.wait(clock.now() + LONG)
    found = background.take()
    assert gate.began.acquire(timeout=LONG), "settling would withdraw a request that has not begun"
    assert background.settle(clock.now() + LONG)
    assert [each.request for each in found + background.take()] == [first, third]
    background.close()


def test_settling_withdraws_requests_and_returns_whether_none_runs() -> None:
    gate, clock = Gate(), Clock()
    background = InferenceWorker(gate, clock)
    background.submit(request(0))
    assert gate.began.acquire(timeout=LONG)
    background.submit(request(1))
    assert not background.settle(clock.now() + 0.01)
    gate.let.release()
    assert background.settle(clock.now() + LONG)
    assert [each.request.seen.number for each in background.take()] == [0]
    background.close()


def test_an_exception_of_an_inference_is_raised_at_collection() -> None:
    def fail(asked: Request) -> Chunk:
        raise ZeroDivisionError

    clock = Clock()
    background = InferenceWorker(fail, clock)
    background.submit(request(0))
    background.wait(clock.now() + LONG)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            background.take()


def test_after_a_failure_the_next_request_is_answered() -> None:
    def fail(asked: Request) -> Chunk:
        if asked.seen.number == 0:
            raise Failure("the server is lost")
        return chunk(asked.seen.number)

    clock = Clock()
    background = InferenceWorker(fail, clock)
    for number in range(2):
        background.submit(request(number))
        background.wait(clock.now() + LONG)
        (found,) = background.take()
        assert (
            (str(found) == "the server is lost") == isinstance(found, Unanswered) == (number == 0)
        )
        assert found.request.seen.number == number
    background.close()


def test_the_same_on_a_virtual_clock() -> None:
    clock = VirtualClock()
    background = ScheduledInference(
        lambda asked: Chunk(asked, np.zeros((1, 4), np.float32)),
        clock,
        lambda asked: 1.0 + asked.seen.number,
    )
    for number in range(3):
        background.submit(request(number))
    background.wait(0.5)
    assert (clock.now(), background.take()) == (0.5, [])
    background.wait(9.0)
    assert clock.now() == 1.0 and [each.request.seen.number for each in background.take()] == [0]
    assert not background.settle(2.0) and background.settle(9.0) and clock.now() == 4.0
    assert [each.request.seen.number for each in background.take()] == [2]


def test_a_chunk_takes_over_at_the_index_of_its_time() -> None:
    queue = ChunkQueue(max_age=1.0)
    assert queue.next(0.0, 0) is None and queue.committed(0) is None
    assert queue.offer(chunk(0, step=0), 0.1, step=1, tick=1) is None
    chosen = queue.next(0.1, 1)
    assert chosen is not None and (chosen.position, chosen.age, chosen.action[0]) == (1, 0.1, 4)
    assert queue.offer(chunk(3, step=2, time=0.2, tick=2), 0.5, step=3, tick=5) is None
    committed = queue.committed(4)
    assert committed is not None and committed.actions[:, 0].tolist() == [8, 12]
    assert committed.frozen == 2, (
        "the slowest of the latest took three ticks, but only two actions are left"
    )
    assert queue.next(0.6, 6) is None


def test_stale_chunks_are_rejected() -> None:
    queue = ChunkQueue(max_age=1.0)
    assert queue.offer(chunk(5, time=4.0), 4.1, step=0, tick=1) is None
    assert queue.offer(chunk(5, time=4.0), 4.1, step=0, tick=1) == SUPERSEDED
    assert queue.offer(chunk(4, time=4.0), 4.1, step=0, tick=1) == SUPERSEDED
    assert queue.offer(chunk(6, time=4.0), 5.1, step=0, tick=1) == TOO_OLD
    assert queue.offer(chunk(6, time=4.0), 4.1, step=4, tick=1) == SPENT
    assert queue.next(5.1, 0) is None, "a chunk is not executed beyond the age limit"
    queue.forget(before=9)
    assert (
        queue.next(4.1, 0) is None
        and queue.offer(chunk(8, time=4.0), 4.1, step=0, tick=1) == SUPERSEDED
    )
    assert queue.offer(chunk(9, time=4.0), 4.1, step=0, tick=1) is None
    assert {SUPERSEDED, TOO_OLD, SPENT} == set(REJECTIONS)


def test_several_requests_in_flight() -> None:
    """Each of another observation; what arrives late is superseded by what came before."""
    gate, clock = Gate(), Clock()
    background = InferenceWorker(gate, clock, in_flight=2)
    first, second, third, fourth = map(request, range(4))
    for each in (first, second):
        background.submit(each)
        assert gate.began.acquire(timeout=LONG)
    for each in (third, fourth):
        background.submit(each)
    assert background.pending() == (second, fourth)
    gate.let.release(3)
    assert gate.began.acquire(timeout=LONG)
    assert background.settle(clock.now() + LONG)
    assert {each.request.seen.number for each in background.take()} == {0, 1, 3}
    background.close()

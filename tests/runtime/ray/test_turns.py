"""Workers of different speed share calls of equal work."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.runtime.ray.turns import PATIENCE, Turns

METHOD = "collect"


@dataclass
class Workers:
    """Workers that take the given seconds per call, in simulated time."""

    seconds: list[float]
    now: float = 0.0
    made: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turns = Turns(lambda: self.now)
        for place in range(len(self.seconds)):
            self.turns.add(place, f"worker {place}")

    def play(self, calls: int, method: str = METHOD) -> float:
        """Make ``calls`` calls that are known from the beginning; return the seconds that it took."""
        began = self.now
        ends = dict[int, float]()
        self.made = [0] * len(self.seconds)
        self.turns.expect(calls)
        while calls or ends:
            while calls and (taken := self.turns.take(method, 0)) is not None:
                place, worker = taken
                assert worker == f"worker {place}" and place not in ends
                ends[place] = self.now + self.seconds[place]
                self.made[place] += 1
                calls -= 1
            place = min(ends, key=lambda place: ends[place])
            self.now = ends.pop(place)
            self.turns.done(place, f"worker {place}")
        return self.now - began


def shortest(seconds: list[float], calls: int) -> float:
    """By all ways to divide the calls."""
    shares = itertools.product(range(calls + 1), repeat=len(seconds))
    return min(
        max(count * each for count, each in zip(share, seconds, strict=True))
        for share in shares
        if sum(share) == calls
    )


@given(st.lists(st.integers(1, 9).map(float), min_size=1, max_size=3), st.integers(1, 7))
def test_the_schedule_is_the_shortest_once_speeds_are_known(
    seconds: list[float], calls: int
) -> None:
    workers = Workers(seconds)
    workers.play(len(seconds))  # unknown: each takes one
    assert workers.made == [1] * len(seconds)
    assert workers.play(calls) == pytest.approx(shortest(seconds, calls))


def test_a_slow_worker_takes_fewer_calls() -> None:
    workers = Workers([1.0, 2.5])
    workers.play(2)
    assert workers.play(8) == 6.0 and workers.made == [6, 2], "5.7 if calls could be divided"
    assert workers.play(2) == 2.0 and workers.made == [2, 0]


def test_a_worker_that_was_passed_over_is_tried_again() -> None:
    workers = Workers([1.0, 2.5])
    workers.play(2)
    rounds = 0
    while not (workers.play(2) and workers.made[1]):
        rounds += 1
    assert 1 < rounds < 10 and 2.5 * PATIENCE**rounds < 2.0
    workers.seconds[1] = 1.0
    workers.play(8)
    assert workers.play(8) == 4.0, "it has become faster"


def test_nobody_waits_for_a_worker_that_does_not_come_back() -> None:
    workers = Workers([1.0, 2.5])
    workers.play(2)
    workers.turns.expect(2)
    assert workers.turns.take(METHOD, 0) == (0, "worker 0")
    assert workers.turns.take(METHOD, 0) is None, "worker 0 would have done it after 2 s"
    workers.now += 3.0
    assert workers.turns.take(METHOD, 0) == (1, "worker 1"), "it is late by 2 s"


def test_a_lost_worker_is_forgotten() -> None:
    workers = Workers([1.0, 2.5])
    workers.play(2)
    workers.turns.expect(2)
    workers.turns.take(METHOD, 0)
    workers.turns.forget(0)
    assert workers.turns.take(METHOD, 0) == (1, "worker 1")
    workers.turns.expect(1)
    workers.turns.add(0, "another")
    assert workers.turns.take(METHOD, 0) == (0, "another"), "its speed is unknown"


def test_a_call_that_failed_says_nothing_about_speed() -> None:
    workers = Workers([1.0, 2.5])
    workers.play(2)
    workers.turns.expect(1)
    place, worker = workers.turns.take(METHOD, 0) or (None, None)
    workers.now += 100
    workers.turns.done(place, worker, finished=False)
    assert workers.play(8) <= 6.0


def test_methods_have_speeds_of_their_own() -> None:
    workers = Workers([1.0, 2.5])
    workers.play(2)
    workers.seconds.reverse()
    workers.play(2, "evaluate")
    assert workers.play(8, "evaluate") == 6.0 and workers.made == [2, 6]

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.features.realworld.clock import Clock
from tests.features.realworld.virtual_time import VirtualClock


@given(st.lists(st.floats(0, 10), max_size=20), st.lists(st.floats(0, 12), max_size=10))
def test_events_run_in_order_at_their_time(moments: list[float], sleeps: list[float]) -> None:
    clock = VirtualClock()
    seen = list[tuple[float, int]]()
    for index, moment in enumerate(moments):
        clock.at(moment, lambda index=index: seen.append((clock.now(), index)))
    reached = 0.0
    for moment in sleeps:
        clock.sleep_until(moment)
        reached = max(reached, moment)
        assert clock.now() == reached
        assert seen == sorted(
            (moment, index) for index, moment in enumerate(moments) if moment <= reached
        )


def test_a_past_event_runs_next_and_time_does_not_go_back() -> None:
    clock = VirtualClock(5.0)
    seen = list[float]()
    clock.at(1.0, lambda: seen.append(clock.now()))
    clock.sleep_until(2.0)
    assert (seen, clock.now()) == ([], 5.0)
    assert clock.step(5.0) and seen == [5.0]


def test_an_event_may_schedule_another() -> None:
    clock = VirtualClock()
    seen = list[float]()
    clock.at(1.0, lambda: clock.at(clock.now() + 1, lambda: seen.append(clock.now())))
    clock.sleep_until(2.0)
    assert seen == [2.0]


def test_the_machines_clock_is_monotonic_and_never_returns_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    clock = Clock()
    until = clock.now() + 0.01
    clock.sleep_until(until)
    assert clock.now() >= until
    clock.sleep_until(until - 1)

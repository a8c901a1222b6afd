"""The rate of the arm's clock, and who is told when it is slow."""

from __future__ import annotations

import pytest

from rlinf_vla.robots.pace import Pace


@pytest.mark.parametrize("rate", [1.0, 0.4])
def test_the_pace_is_that_of_the_last_seconds(rate: float) -> None:
    pace = Pace()
    clock = 0.0
    for tick in range(1000):
        pace.see(tick / 100, clock)
        assert tick > 50 or pace.value == pytest.approx(1.0)
        clock += (1.0 if tick < 500 else rate) / 100
    assert pace.value == pytest.approx(rate)


def test_a_clock_that_stands_or_starts_again_has_no_negative_pace() -> None:
    pace = Pace()
    for tick, clock in enumerate([5.0, 5.0, 0.0, 0.1]):
        pace.see(float(tick), clock)
        assert pace.value >= 0

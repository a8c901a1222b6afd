from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_vla.rollout.control_config import ControlConfig
from rlinf_vla.rollout.control_step import FINISHED
from tests.rollout.control import HZ, MS, Cell, expected

LENIENT = {"warmup": 0, "max_misses": 1000}


@pytest.mark.parametrize(("delay", "misses"), [(0, 0), (50, 0), (90, 0), (110, 1), (200, 2), (400, 4)])
def test_a_slow_inference_costs_exactly_the_periods_that_it_takes(delay: int, misses: int) -> None:
    """Chunks of one action: infer, then execute; the third inference is slow."""
    cell = Cell([20, 20, delay, 20])
    assert cell.run(10).kind == FINISHED
    assert cell.by == "pp" + "h" * misses + "p" * (8 - misses)
    assert cell.loop.accounting.missed == misses


@settings(max_examples=200)
@given(
    delays=st.lists(st.integers(0, 450), min_size=1, max_size=12),
    chunk=st.integers(1, 6),
    asynchronous=st.booleans(),
    horizon=st.integers(1, 6),
    age=st.integers(110, 1200),
)
def test_random_delays_against_brute_force(delays: list[int], chunk: int, asynchronous: bool, horizon: int, age: int) -> None:
    asynchronous, horizon = asynchronous and chunk > 1, min(horizon, chunk)
    age = max(age, 100 * horizon + 1)
    config = ControlConfig(asynchronous, horizon, max_observation_age_s=age * MS, reserve_ms=10e3 * MS, **LENIENT)
    cell = Cell(delays, chunk, config)
    cell.run(40)
    assert cell.done == expected(delays, 40, chunk, asynchronous, horizon, age)
    assert all(step.chosen is None or step.chosen.age <= age * MS for step in cell.steps)
    assert len(cell.robot.commands) == cell.by.count("p")

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.algorithms.sft import warmup_cosine


@given(st.integers(0, 50), st.integers(1, 500))
def test_the_learning_rate_rises_then_falls(warmup: int, more: int) -> None:
    total = warmup + more
    rates = [warmup_cosine(step, warmup, total) for step in range(total + 3)]
    assert rates[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)])
    assert rates[warmup] == 1 and rates[total:] == pytest.approx([0, 0, 0])
    assert all(
        after <= before for before, after in zip(rates[warmup:], rates[warmup + 1 :], strict=False)
    )


def test_the_learning_rate_half_way_through_its_decay() -> None:
    assert warmup_cosine(60, 10, 110) == pytest.approx(0.5)
    assert warmup_cosine(35, 10, 110) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))

"""Agreement of predicted values with returns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.evaluation.held_out import spearman, value_errors, value_headline

NUMBERS = st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=2, max_size=30)


@given(NUMBERS)
def test_the_rank_correlation_is_that_of_the_ranks(pairs: list[tuple[int, int]]) -> None:
    x, y = (np.array(values, float) for values in zip(*pairs, strict=True))
    ranks = [
        np.array([(values < value).sum() + ((values == value).sum() + 1) / 2 for value in values])
        for values in (x, y)
    ]
    found = spearman(x, y)
    if any(rank.std() == 0 for rank in ranks):
        assert found is None
        return
    centred = [rank - rank.mean() for rank in ranks]
    expected = (centred[0] * centred[1]).sum() / np.sqrt(np.prod([(c**2).sum() for c in centred]))
    assert found == pytest.approx(expected)


def test_a_headline_says_what_was_compared() -> None:
    values, returns = torch.tensor([-0.5, -0.2, -0.1]), torch.tensor([-0.6, -0.3, -0.2])
    document = value_errors(values, returns, torch.tensor([7, 7, 9]))
    assert document["episodes"] == 2 and document["mean_absolute_error"] == pytest.approx(0.1)
    assert value_headline(document) == (
        "rank correlation 1.00 with the returns of 2 held-out episodes (3 frames), mean error 0.100 of 1"
    )
    same = value_errors(torch.zeros(3), returns, torch.zeros(3))
    assert value_headline(same).startswith("rank correlation not defined")

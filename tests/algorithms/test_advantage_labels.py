"""Returns, values and advantage labels, beside loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.algorithms.advantage_labels import (
    BINS,
    advantages,
    best,
    centres,
    expected,
    longest_of,
    returns_to_go,
    two_hot,
)

LENGTHS = st.integers(1, 40)
FAILURES = st.floats(0, 3)


@given(LENGTHS, st.integers(0, 20), st.booleans(), FAILURES)
def test_returns_are_sums_of_rewards(length: int, more: int, success: bool, failure: float) -> None:
    longest = length + more
    rewards = [-1.0] * (length - 1) + [0.0 if success else -failure * longest]
    lowest = (1 + failure) * longest
    found = returns_to_go(length, success, longest, failure)
    assert found.tolist() == pytest.approx([sum(rewards[t:]) / lowest for t in range(length)])
    assert found.min() >= -1 and found.max() <= 0


@given(st.lists(st.floats(-1.5, 0.5, width=32), min_size=1, max_size=20))
def test_a_target_has_its_value_as_mean(numbers: list[float]) -> None:
    values = torch.tensor(numbers)
    target = two_hot(values)
    assert target.sum(1).tolist() == pytest.approx([1.0] * len(numbers))
    assert ((target > 0).sum(1) <= 2).all()
    assert (target @ centres()).tolist() == pytest.approx(values.clamp(-1, 0).tolist(), abs=1e-6)
    assert expected(target.clamp(min=1e-30).log()).tolist() == pytest.approx(
        values.clamp(-1, 0).tolist(), abs=1e-5
    )


def test_bins_lie_between_the_lowest_return_and_success() -> None:
    assert centres().tolist() == pytest.approx([-1 + i / (BINS - 1) for i in range(BINS)])


@given(LENGTHS, st.integers(1, 50), st.booleans(), st.integers(0, 2**31 - 1))
def test_an_advantage_is_what_the_next_steps_earn_and_the_value_gains(
    length: int, steps: int, success: bool, seed: int
) -> None:
    values = -torch.rand(length, generator=torch.Generator().manual_seed(seed))
    returns = returns_to_go(length, success, 40, 1.0)
    rewards = [float(now - after) for now, after in zip(returns, [*returns[1:], 0.0], strict=True)]
    for t, found in enumerate(advantages(returns, values, steps).tolist()):
        end = min(t + steps, length)
        after = float(values[end]) if t + steps < length else 0.0
        assert found == pytest.approx(sum(rewards[t:end]) + after - float(values[t]), abs=1e-5)


def test_a_perfect_value_leaves_no_advantage() -> None:
    returns = returns_to_go(30, False, 40, 1.0)
    assert advantages(returns, returns, 7).tolist() == pytest.approx([0.0] * 30, abs=1e-6)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=60), st.floats(0.01, 1), st.integers(0, 9))
def test_the_best_are_at_least_the_share_and_no_worse_one(
    numbers: list[int], share: float, person: int
) -> None:
    advantage = torch.tensor(numbers).float()
    always = torch.arange(len(numbers)) == person
    found = best(advantage, share, always)
    assert found[always].all()
    chosen = best(advantage, share, torch.zeros_like(always))
    assert chosen.float().mean() >= share - 1e-9
    lowest = advantage[chosen].min()
    assert not chosen[advantage < lowest].any() and chosen[advantage >= lowest].all()
    assert int((advantage > lowest).sum()) < share * len(numbers)


def test_tasks_have_longest_episodes_of_their_own() -> None:
    assert longest_of(["a", "b", "a"], [3, 9, 5]) == {"a": 5, "b": 9}

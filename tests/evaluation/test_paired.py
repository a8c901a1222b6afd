"""Paired comparison with negatively correlated outcomes, and with tasks that share their seeds."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest

from rlinf_vla.evaluation.statistics import compare, paired_difference, wilson_interval


@pytest.mark.parametrize(
    ("both", "gained", "lost", "neither"), [(2, 9, 7, 3), (0, 12, 4, 1), (5, 20, 18, 4)]
)
def test_a_negative_correlation_is_not_corrected(
    both: int, gained: int, lost: int, neither: int
) -> None:
    """Newcombe 1998, method 10: phi's numerator is corrected by n / 2 if it is positive, and unchanged if it is negative."""
    n = both + gained + lost + neither
    before = [True] * both + [False] * gained + [True] * lost + [False] * neither
    after = [True] * both + [True] * gained + [False] * lost + [False] * neither
    (l1, u1), (l2, u2) = wilson_interval(both + gained, n), wilson_interval(both + lost, n)
    p1, p2 = (both + gained) / n, (both + lost) / n
    phi = (both * neither - gained * lost) / sqrt(
        (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    )
    assert phi < -0.1
    low = p1 - p2 - sqrt((p1 - l1) ** 2 - 2 * phi * (p1 - l1) * (u2 - p2) + (u2 - p2) ** 2)
    high = p1 - p2 + sqrt((p2 - l2) ** 2 - 2 * phi * (p2 - l2) * (u1 - p1) + (u1 - p1) ** 2)
    difference, interval = paired_difference(before, after)
    assert difference == pytest.approx(p1 - p2) and interval == pytest.approx((low, high))


def document(outcomes: dict[tuple[str, int], bool]) -> dict[str, Any]:
    return {
        "greedy": {
            "episodes": [
                {"task": task, "seed": seed, "success": won}
                for (task, seed), won in outcomes.items()
            ]
        }
    }


def test_episodes_are_paired_by_task_and_seed() -> None:
    before = {("a", 0): True, ("b", 0): False, ("a", 1): False, ("b", 1): True, ("b", 2): True}
    after = {("b", 1): True, ("b", 0): True, ("a", 0): True, ("a", 1): True, ("a", 7): False}
    (found,) = compare(document(before), document(after)).values()
    assert (found["n_pairs"], found["n_gained"], found["n_lost"]) == (4, 2, 0)
    assert found["pc_difference"] == pytest.approx(50)

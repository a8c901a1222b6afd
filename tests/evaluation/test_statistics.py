from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.evaluation.statistics import (
    Episode,
    compare,
    mcnemar_exact,
    paired_difference,
    summary,
    wilson_interval,
)

counts = st.integers(0, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
pairs = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


def table(both: int, lost: int, gained: int, neither: int) -> tuple[list[bool], list[bool]]:
    outcomes = (
        [(True, True)] * both
        + [(True, False)] * lost
        + [(False, True)] * gained
        + [(False, False)] * neither
    )
    return [first for first, _ in outcomes], [second for _, second in outcomes]


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998) 857-872, Table I, method 3.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_published(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(counts)
def test_wilson_contains_the_rate_and_is_symmetric(count: tuple[int, int]) -> None:
    successes, n = count
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= (successes / n if n else 0.5) <= high <= 1
    mirrored = wilson_interval(n - successes, n)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-12)


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))))
def test_wilson_grows_with_successes_and_shrinks_with_less_confidence(
    count: tuple[int, int],
) -> None:
    successes, n = count
    low, high = wilson_interval(successes, n)
    more_low, more_high = wilson_interval(successes + 1, n)
    assert more_low > low and more_high > high
    loose_low, loose_high = wilson_interval(successes, n, confidence=0.8)
    assert low <= loose_low and loose_high <= high


def test_wilson_edges() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(0, 7)[0] == 0.0 and wilson_interval(7, 7)[1] == 1.0
    with pytest.raises(ValueError, match="8 successes in 7"):
        wilson_interval(8, 7)


@pytest.mark.parametrize(("rate", "n"), [(0.05, 100), (0.3, 40), (0.5, 200), (0.9, 64)])
def test_wilson_covers_the_truth(rate: float, n: int) -> None:
    draws = np.random.default_rng(7).binomial(n, rate, 4000)
    intervals = {k: wilson_interval(int(k), n) for k in np.unique(draws)}
    covered = np.mean([intervals[k][0] <= rate <= intervals[k][1] for k in draws])
    assert 0.93 < covered < 0.975


def test_mcnemar_against_enumeration() -> None:
    """With n changed episodes, all 2**n outcomes are equally likely."""
    for gained, lost in itertools.product(range(6), range(6)):
        n = gained + lost
        extreme = sum(
            abs(2 * sum(way) - n) >= abs(gained - lost)
            for way in itertools.product((0, 1), repeat=n)
        )
        assert mcnemar_exact(*table(3, lost, gained, 2)) == pytest.approx(extreme / 2**n)


@given(pairs)
def test_mcnemar_is_symmetric_and_depends_only_on_changes(
    outcomes: list[tuple[bool, bool]],
) -> None:
    before, after = [first for first, _ in outcomes], [second for _, second in outcomes]
    p = mcnemar_exact(before, after)
    assert 0 < p <= 1
    assert p == mcnemar_exact(after, before)
    assert p == mcnemar_exact([*before, True, False], [*after, True, False])


def test_mcnemar_with_many_episodes() -> None:
    assert 0 < mcnemar_exact(*table(0, 100, 1000, 0)) < 1e-100
    with pytest.raises(ValueError, match="zip"):
        mcnemar_exact([True], [True, False])


@pytest.mark.parametrize(
    ("both", "lost", "gained", "neither", "difference", "low", "high"),
    [
        # Fagerland, Lydersen & Laake, Statistics in Medicine 33 (2014) 2850-2875: airway hyper-responsiveness, and complete
        # response (also the reference output of their R package contingencytables). They take first - second; signs are turned.
        (1, 1, 7, 12, 0.2857, 0.026, 0.507),
        (59, 6, 16, 80, 0.0621, 0.0046, 0.1186),
        # Altman et al., Statistics with Confidence (2nd ed., 2000), Table 6.2: 0.12, from 0.01 to 0.23.
        (14, 0, 5, 22, 0.122, 0.011, 0.226),
    ],
)
def test_paired_difference_published(
    both: int, lost: int, gained: int, neither: int, difference: float, low: float, high: float
) -> None:
    found, interval = paired_difference(*table(both, lost, gained, neither))
    assert found == pytest.approx(difference, abs=5e-4)
    assert interval == pytest.approx((low, high), abs=5e-4)


@given(pairs)
def test_paired_difference_is_bounded_and_antisymmetric(outcomes: list[tuple[bool, bool]]) -> None:
    before, after = [first for first, _ in outcomes], [second for _, second in outcomes]
    difference, (low, high) = paired_difference(before, after)
    assert -1 - 1e-12 <= low <= difference <= high <= 1 + 1e-12
    assert low < high
    backwards, (backwards_low, backwards_high) = paired_difference(after, before)
    assert backwards == pytest.approx(-difference)
    assert (backwards_low, backwards_high) == pytest.approx((-high, -low))


def test_paired_difference_covers_the_truth() -> None:
    cells = np.array([0.25, 0.05, 0.4, 0.3])  # both, lost, gained, neither
    draws = np.random.default_rng(3).multinomial(60, cells, 3000)
    truth = cells[2] - cells[1]
    hits = []
    for draw in draws:
        _, (low, high) = paired_difference(*table(*map(int, draw)))
        hits.append(low <= truth <= high)
    assert 0.935 < np.mean(hits) < 0.975


def test_summary() -> None:
    def played(*outcomes: bool, tasks: str = "") -> list[Episode]:
        return [
            {"success": won, "task": task}
            for won, task in itertools.zip_longest(outcomes, tasks.split())
        ]

    result = summary(played(True, True, False, True, tasks="push pull push push"), "task")
    assert (result["n_episodes"], result["n_success"], result["pc_success"]) == (4, 3, 75.0)
    assert result["pc_success_ci95"] == pytest.approx([100 * x for x in wilson_interval(3, 4)])
    assert list(result["per_task"]) == ["push", "pull"], "in their order"
    assert result["per_task"]["push"] == summary(played(True, False, True))
    assert "per_task" not in summary(played(True))
    json.dumps(summary(played(*np.array([True, False]).tolist())))
    with pytest.raises(ValueError, match="no episodes"):
        summary([])


def test_compare_pairs_by_episode_and_not_by_position() -> None:
    def block(outcomes: dict[int, bool]) -> dict[str, object]:
        return {
            "episodes": [
                {"task": "push", "seed": seed, "success": won} for seed, won in outcomes.items()
            ]
        }

    before = {"greedy": block({1: False, 2: True, 3: False, 9: True}), "sampled": block({1: True})}
    after = {"greedy": block({3: True, 2: True, 1: False, 8: False}), "checkpoint": "x"}
    result = compare(before, after)
    assert list(result) == ["greedy"]
    greedy = result["greedy"]
    assert (greedy["n_pairs"], greedy["n_gained"], greedy["n_lost"], greedy["p_value"]) == (
        3,
        1,
        0,
        1.0,
    )
    assert greedy["pc_difference"] == pytest.approx(100 / 3)
    assert math.isclose(
        greedy["pc_difference_ci95"][1], 100 * paired_difference(*table(1, 0, 1, 1))[1][1]
    )
    assert compare(before, {"greedy": block({77: True})}) == {}

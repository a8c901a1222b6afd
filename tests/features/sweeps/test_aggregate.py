"""Intervals over runs, tasks and episodes, rliable's statistics, and time to success."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from rlinf_vla.evaluation.statistics import wilson_interval
from rlinf_vla.features.sweeps.aggregate import (
    Outcomes,
    hierarchical_difference,
    hierarchical_interval,
    interquartile_interval,
    interquartile_mean,
    performance_profile,
    profile_interval,
    time_to_success,
)


def run(rates: dict[str, float], n: int = 40) -> list[dict[str, Any]]:
    """A run's episodes, of which that share succeeds in each task."""
    won = {task: round(rate * n) for task, rate in rates.items()}
    return [
        {"task": task, "seed": seed, "success": seed < won[task], "steps": 3}
        for task in rates
        for seed in range(n)
    ]


def test_outcomes_are_counted_by_run_and_task() -> None:
    found = Outcomes([run({"push": 0.5, "pull": 0.25}), run({"pull": 1.0, "push": 0.0}, n=20)])
    assert found.tasks == ["pull", "push"]
    assert found.won.tolist() == [[10, 20], [20, 0]] and found.played.tolist() == [
        [40, 40],
        [20, 20],
    ]
    assert found.of(["push"]).tasks == ["push"] and found.of(["push"]).won.tolist() == [[20], [0]]
    assert found.of(["push", "pull"]).scores.tolist() == [[0.5, 0.25], [0.0, 1.0]]
    with pytest.raises(ValueError, match="tasks"):
        Outcomes([run({"push": 0.5}), run({"pull": 0.5})])
    with pytest.raises(ValueError, match="no episodes"):
        Outcomes([])
    with pytest.raises(ValueError, match="seed 3 of push twice"):
        Outcomes([run({"push": 0.5}), [*run({"push": 0.5}), run({"push": 0.5})[3]]])
    suites = [each | {"suite": suite} for suite in ("one", "two") for each in run({"push": 0.5})]
    assert Outcomes([suites]).tasks == ["one: push", "two: push"], (
        "equal names in two suites are two tasks"
    )


def test_with_one_run_and_task_only_episodes_vary() -> None:
    rate, (low, high) = hierarchical_interval(Outcomes([run({"push": 0.3}, n=200)]))
    assert rate == 0.3
    assert (low, high) == pytest.approx(wilson_interval(60, 200), abs=0.015)


def test_the_spread_of_runs_and_of_tasks_widens_the_interval() -> None:
    def width(*runs: dict[str, float]) -> float:
        rate, (low, high) = hierarchical_interval(Outcomes([run(each, n=400) for each in runs]))
        assert rate == pytest.approx(0.5) and low < 0.5 < high
        return high - low

    alike = width(*[{"push": 0.5, "pull": 0.5}] * 4)
    runs = width(*[{"push": rate, "pull": rate} for rate in (0.3, 0.4, 0.6, 0.7)])
    tasks = width(*[{"push": 0.3, "pull": 0.7}] * 4)
    assert alike < 0.1 and runs > 2.5 * alike and tasks > 2.5 * alike


def test_of_one_run_and_task_it_is_the_jeffreys_interval() -> None:
    for won, n in ((3, 10), (60, 200), (199, 200)):
        _, found = hierarchical_interval(Outcomes([run({"push": won / n}, n)]))
        assert found == pytest.approx(
            stats.beta(won + 0.5, n - won + 0.5).ppf([0.025, 0.975]), abs=0.01
        )


def test_outcomes_that_are_all_equal_do_not_make_it_a_point() -> None:
    always, never = (Outcomes([run({"push": rate}, n=10)]) for rate in (1.0, 0.0))
    assert (
        0.7 < hierarchical_interval(always)[1][0] < 0.85
        and hierarchical_interval(always)[1][1] == 1.0
    )
    assert (
        hierarchical_interval(never)[1][0] == 0.0
        and 0.15 < hierarchical_interval(never)[1][1] < 0.3
    )
    low, high = hierarchical_difference(always, always)[1]
    assert low < -0.1 and high > 0.1
    many = Outcomes([run({str(task): 1.0 for task in range(20)}, n=10)] * 3)
    assert 0.99 < hierarchical_interval(many)[1][0] < 1.0, (
        "the prior is that of all episodes together"
    )


@pytest.mark.parametrize(
    ("runs", "spread", "difficulty", "least"),
    [
        (8, 0.1, 0, 183),
        (3, 0.05, 0, 183),
        (2, 0.1, 0, 183),
        (3, 0.2, 0, 183),
        (3, 0, 0.3, 190),
        (5, 0, 0.3, 190),
        (3, 0.05, 0.3, 183),
    ],
)
def test_the_hierarchical_interval_covers_the_mean_of_the_runs_drawn(
    runs: int, spread: float, difficulty: float, least: int
) -> None:
    """200 experiments: rates of runs vary by ``spread``, and all runs play the same episodes, which vary in difficulty."""
    generator = np.random.default_rng(0)
    covered = 0
    for number in range(200):
        easy = generator.beta(difficulty, difficulty, 100) if difficulty else np.full(100, 0.5)
        rates = np.clip(easy + generator.normal(0, spread, (runs, 1)), 0, 1)
        won = generator.random((runs, 100)) < rates
        outcomes = [
            [{"task": "push", "seed": seed, "success": each} for seed, each in enumerate(row)]
            for row in won
        ]
        _, (low, high) = hierarchical_interval(Outcomes(outcomes), seed=number)
        covered += low <= 0.5 <= high
    assert covered >= least, covered


def test_runs_that_play_the_same_episodes_do_not_make_more_of_them() -> None:
    """A greedy policy before training is the same on all seeds of a proof."""
    one, three = (Outcomes([run({"push": 0.4}, n=200)] * count) for count in (1, 3))
    narrow, wide = (hierarchical_interval(each)[1] for each in (three, one))
    assert narrow == pytest.approx(wide, abs=0.01)
    _, (low, high) = hierarchical_difference(three, three)
    assert -0.01 < low <= 0 <= high < 0.01


def test_a_difference_shares_its_tasks() -> None:
    """Tasks of very different difficulty cancel in a difference."""
    before = Outcomes([run({"push": 0.1, "pull": 0.8}, n=400)] * 3)
    after = Outcomes([run({"push": 0.2, "pull": 0.9}, n=400)] * 2)
    found, (low, high) = hierarchical_difference(before, after)
    assert found == pytest.approx(0.1)
    assert 0 < low < 0.1 < high
    assert hierarchical_difference(after, before)[0] == pytest.approx(-0.1)
    with pytest.raises(ValueError, match="tasks"):
        hierarchical_difference(before, Outcomes([run({"push": 0.5})]))


def test_the_interquartile_mean_is_scipys_trimmed_mean() -> None:
    generator = np.random.default_rng(1)
    for shape in ((3, 1), (5, 4), (2, 3), (1, 2), (10, 7)):
        scores = generator.random(shape)
        assert interquartile_mean(scores) == pytest.approx(stats.trim_mean(scores, 0.25, axis=None))
        stack = np.stack([scores, scores[::-1] * 0.5])
        assert interquartile_mean(stack) == pytest.approx(
            [float(interquartile_mean(each)) for each in stack]
        )


def test_a_profile_counts_the_scores_above_each_threshold() -> None:
    scores = np.array([[0.0, 0.5], [0.5, 1.0]])
    assert performance_profile(scores, np.array([0.0, 0.4, 0.5, 0.9, 1.0])).tolist() == [
        0.75,
        0.75,
        0.25,
        0.25,
        0.0,
    ]


def of_runs(*rates: float, tasks: int = 1, n: int = 1000) -> Outcomes:
    """Each run has the same rate in every task."""
    return Outcomes([run({str(task): rate for task in range(tasks)}, n) for rate in rates])


def test_few_runs_have_students_t_interval() -> None:
    for rates in ((0.4, 0.5), (0.3, 0.4, 0.5), (0.2, 0.6, 0.3, 0.5, 0.4)):
        expected = np.clip(
            stats.t.interval(0.95, len(rates) - 1, np.mean(rates), stats.sem(rates)), 0, 1
        )
        assert hierarchical_interval(of_runs(*rates))[1] == pytest.approx(expected)
        assert interquartile_interval(of_runs(*rates, tasks=4)) == pytest.approx(expected)


def test_the_difference_of_few_runs_is_welchs() -> None:
    for first, second in (((0.3, 0.34), (0.4, 0.5, 0.6)), ((0.3, 0.4, 0.38), (0.5, 0.52, 0.7))):
        found, interval = hierarchical_difference(of_runs(*first), of_runs(*second))
        expected = stats.ttest_ind(second, first, equal_var=False).confidence_interval(0.95)
        assert (
            interval == pytest.approx((max(-1, expected.low), min(1, expected.high))) and found > 0
        )
        assert hierarchical_difference(of_runs(*second), of_runs(*first))[1] == pytest.approx(
            (-interval[1], -interval[0])
        )
    assert hierarchical_difference(of_runs(0.1, 0.9), of_runs(0.2, 0.8))[1] == (-1.0, 1.0)


def test_a_difference_from_one_run_has_the_variance_of_its_episodes() -> None:
    rates = (0.5, 0.52, 0.6)
    one = 0.3
    variances = np.var(rates, ddof=1) / 3, one * (1 - one) / 100
    half = stats.t.ppf(0.975, 2 * (sum(variances) / variances[0]) ** 2) * sum(variances) ** 0.5
    difference, (low, high) = hierarchical_difference(
        Outcomes([run({"0": one}, 100)]), of_runs(*rates)
    )
    assert (
        low <= difference - half + 1e-9
        and high >= difference + half - 1e-9
        and high - low < 2.2 * half
    )
    alone = hierarchical_difference(
        Outcomes([run({"0": 0.3}, 100)]), Outcomes([run({"0": 0.5}, 100)])
    )[1]
    assert alone[1] - alone[0] < 0.2, (
        "one run each: the same episodes, which both found easy or difficult"
    )


def test_runs_that_are_all_equal_do_not_make_a_point() -> None:
    for rate in (0.0, 0.5, 1.0):
        equal = of_runs(rate, rate, rate, tasks=4, n=20)
        for low, high in (
            hierarchical_interval(equal)[1],
            interquartile_interval(equal),
            hierarchical_difference(equal, equal)[1],
        ):
            assert 0.005 < high - low < 0.3
    assert profile_interval(np.array([1.0, 0.0]), 3) == [
        wilson_interval(3, 3),
        wilson_interval(0, 3),
    ]
    one = Outcomes([run({"0": 1.0}, 20)])
    low, high = hierarchical_difference(one, of_runs(1.0, 1.0, n=20))[1]
    assert -0.3 < low < -0.01 and 0.01 < high < 0.3


@pytest.mark.parametrize(("runs", "tasks"), [(2, 4), (3, 4), (5, 1), (5, 4)])
def test_intervals_of_few_runs_cover(runs: int, tasks: int) -> None:
    """60 experiments: a run's tasks rise and fall together, as after a good or a bad seed."""
    generator = np.random.default_rng(runs)
    covered = np.zeros(3)
    for number in range(60):
        rates = 1 / (1 + np.exp(-generator.normal(0, 1, (2 * runs, 1, 1))))
        won = generator.random((2 * runs, tasks, 40)) < rates
        found = [
            [
                {"task": str(t), "seed": s, "success": w}
                for t, row in enumerate(each)
                for s, w in enumerate(row)
            ]
            for each in won
        ]
        first, second = Outcomes(found[:runs]), Outcomes(found[runs:])
        middle = interquartile_interval(first)
        profile = profile_interval(performance_profile(first.scores, np.array([0.49])), runs)[0]
        inside = [middle[0] <= 0.5 <= middle[1], profile[0] <= 0.5 <= profile[1]]
        low, high = hierarchical_difference(first, second, number)[1]
        covered += [*inside, low <= 0 <= high]
    assert (covered >= 52).all(), covered  # of 60: 95 % are 57, with a standard deviation of 1.7


def test_time_to_success() -> None:
    episodes = [
        {"success": won, "steps": steps}
        for won, steps in ((True, 2), (True, 5), (False, 8), (True, 8))
    ]
    found = time_to_success(episodes, limit=8)
    assert found["steps"] == list(range(1, 9)) and found["pc_solved"] == [
        0,
        25,
        25,
        25,
        50,
        50,
        50,
        75,
    ]
    assert (found["pc_low"][4], found["pc_high"][4]) == pytest.approx(
        tuple(100 * each for each in wilson_interval(2, 4))
    )
    long = time_to_success(episodes, limit=1000)
    assert len(long["steps"]) == 50 and long["steps"][0] == 1 and long["steps"][-1] == 1000
    with pytest.raises(ValueError, match="no episodes"):
        time_to_success([], 8)

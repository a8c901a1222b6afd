"""Sequential comparison: exact expectations by enumeration, error under continuous peeking, power, and its confidence sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.evaluation.sequential import (
    ALPHA,
    BETS,
    confidence_sequence,
    decide,
    decide_paired,
    paired_evidence,
)
from rlinf_vla.evaluation.statistics import anytime_comparison, mcnemar_exact, paired_episodes

REPEATS, LENGTH = 2000, 300
MOST_FALSE = 0.05 + 3 * (0.05 * 0.95 / REPEATS) ** 0.5
"""Three standard deviations of a share of 5 % in REPEATS simulations above it: 6.5 %."""


def simulated(cells: tuple[float, float, float, float], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Outcomes before and after, float64 ``[REPEATS, LENGTH]``. ``cells``: both, gained, lost, neither."""
    drawn = np.random.default_rng(seed).choice(4, (REPEATS, LENGTH), p=cells)
    return np.isin(drawn, (0, 2)).astype(float), np.isin(drawn, (0, 1)).astype(float)


def ever(log_evidence: np.ndarray, level: float = ALPHA / 2) -> np.ndarray:
    return (log_evidence >= np.log(1 / level)).any(-1)


def test_paired_evidence_is_the_average_wealth_of_fixed_bets() -> None:
    gains = np.array([1, -1, 0, 1, 0.5])
    wealth = [np.prod(1 + bet * gains) for bet in BETS]
    assert paired_evidence(gains)[-1] == pytest.approx(np.log(np.mean(wealth)))
    assert len(paired_evidence(gains)) == 5


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param((0.3, 0.2, 0.2, 0.3), marks=pytest.mark.nightly),
        pytest.param((0.0, 0.5, 0.5, 0.0), marks=pytest.mark.nightly),
        (0.86, 0.02, 0.02, 0.1),
    ],
)
def test_paired_errors_under_continuous_peeking(cells: tuple[float, float, float, float]) -> None:
    before, after = simulated(cells, seed=5)
    wrong = ever(paired_evidence(after - before)) | ever(paired_evidence(before - after))
    assert wrong.mean() <= MOST_FALSE


@pytest.mark.parametrize("rate", [0.5, 0.9, 0.05])
def test_errors_of_independent_episodes_under_continuous_peeking(rate: float) -> None:
    first, second = (np.random.default_rng(3).random((2, REPEATS, LENGTH)) < rate).astype(float)
    wrong = ever(paired_evidence(second - first)) | ever(paired_evidence(first - second))
    assert wrong.mean() <= MOST_FALSE


def test_a_repeated_mcnemar_test_is_wrong_far_more_often() -> None:
    """What the evidence protects from: the same peeking, every ten episodes, at p < 0.05."""
    before, after = simulated((0.0, 0.5, 0.5, 0.0), seed=5)
    looks = range(10, LENGTH + 1, 10)
    wrong = [
        any(mcnemar_exact(a[:n] > 0, b[:n] > 0) < 0.05 for n in looks)
        for a, b in zip(before[:300], after[:300], strict=True)
    ]
    assert np.mean(wrong) > 0.15


def test_means_of_several_tasks_are_tested_together() -> None:
    """Two tasks that differ in opposite directions; on average the second policy is worse."""
    generator = np.random.default_rng(2)
    rates = np.array([[0.8, 0.3], [0.2, 0.7]])  # of both policies (rows) in both tasks
    drawn = (generator.random((REPEATS, LENGTH, 2, 2)) < rates).astype(float)
    gains = (drawn[:, :, 1] - drawn[:, :, 0]).mean(-1)
    assert abs(rates.mean(1) @ np.array([-1, 1]) + 0.1) < 1e-9, "the second is worse by 0.1"
    assert (
        ever(paired_evidence(gains)).mean() <= MOST_FALSE
        and ever(paired_evidence(-gains)).mean() > 0.7
    )


def test_a_difference_is_found_with_fewer_episodes() -> None:
    """30 points: the evidence decides in most of 2,000 simulations, on average before half of the episodes."""
    before, after = simulated((0.3, 0.35, 0.05, 0.3), seed=8)
    reached = paired_evidence(after - before) >= np.log(2 / ALPHA)
    assert reached.any(-1).mean() > 0.99
    assert reached.argmax(-1)[reached.any(-1)].mean() < 60
    apart = paired_evidence(np.roll(after, 1, axis=0) - before) >= np.log(2 / ALPHA)
    assert apart.any(-1).mean() > 0.99, "of independent episodes"
    assert not ever(paired_evidence(before - after)).mean() > 0.01


def test_the_first_direction_to_reach_the_level_decides() -> None:
    level = np.log(2 / ALPHA)
    rising = np.array([0.0, 1.0, level, 9.0])
    late = np.array([0.0, 0.0, 0.0, level])
    assert (decide(rising, late).better, decide(rising, late).rounds) == ("second", 3)
    assert (decide(late, rising).better, decide(late, rising).rounds) == ("first", 3)
    none = decide(late - 1, late - 1)
    assert (
        none.better is None and none.rounds is None and none.p_value == pytest.approx(ALPHA * np.e)
    )
    assert decide(np.array([]), np.array([])).p_value == 1.0
    assert decide(rising, late).p_value == pytest.approx(2 * np.exp(-9.0))


def test_decisions_do_not_change_with_later_episodes() -> None:
    gains = np.array([1.0] * 12 + [-1.0] * 40)
    whole = decide_paired(gains)
    assert whole.better == "second" and whole.rounds is not None
    assert decide_paired(gains[: whole.rounds]).rounds == whole.rounds
    assert decide_paired(gains[: whole.rounds - 1]).better is None


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0]), max_size=40))
def test_a_confidence_sequence_contains_the_mean_and_agrees_with_the_decision(
    gains: list[float],
) -> None:
    values = np.array(gains)
    low, high = confidence_sequence(values)
    assert -1 <= low < high <= 1
    assert confidence_sequence(-values) == pytest.approx((-high, -low))
    better = decide_paired(values).better
    if min(abs(low), abs(high)) > 1e-5:
        assert (better == "second") == (low > 0) and (better == "first") == (high < 0)


def test_a_confidence_sequence_covers_the_truth_at_all_times() -> None:
    before, after = simulated((0.3, 0.3, 0.1, 0.3), seed=4)
    gains = after - before
    truth = 0.2
    above = paired_evidence((gains - truth) / (1 + truth)).max(-1) >= np.log(2 / ALPHA)
    below = paired_evidence((truth - gains) / (1 - truth)).max(-1) >= np.log(2 / ALPHA)
    assert (above | below).mean() <= MOST_FALSE
    for row in range(20):
        low, high = confidence_sequence(gains[row])
        assert (low <= truth + 1e-5) == (not above[row]) and (high >= truth - 1e-5) == (
            not below[row]
        )
        assert high - low < 0.5


def episodes(outcomes: dict[tuple[str, int], bool]) -> list[dict[str, Any]]:
    return [{"task": task, "seed": seed, "success": won} for (task, seed), won in outcomes.items()]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("first", "second", "tasks", "count"),
    [
        ([0.9, 0.3], [0.5, 0.9], 40, 20),
        ([0.95, 0.05], [0.05, 0.95], 10, 100),
        ([0.9, 0.5], [0.7, 0.7], 10, 50),
        ([0.8, 0.5], [0.6, 0.7], 90, 10),
    ],
)
def test_the_worse_policy_is_not_named_when_tasks_differ(
    first: list[float], second: list[float], tasks: int, count: int, shared: bool
) -> None:
    """The first policy is ahead in the tasks whose names come first, and on average not better; tasks have different numbers of seeds."""
    generator = np.random.default_rng(1)
    wrong = 0
    names = [f"task {number:02d}" for number in range(tasks)]
    rates = [np.repeat(each, tasks // 2) for each in (first, second)]
    repeats = 4000 // (tasks * count) + 20
    for _ in range(repeats):
        played = [
            episodes(
                {
                    (name, seed + start): bool(generator.random() < rate[number])
                    for number, name in enumerate(names)
                    for seed in range(count + (0 if shared else 3 * (number < tasks // 2)))
                }
            )
            for start, rate in zip((0, 0 if shared else 1000), rates, strict=True)
        ]
        found = anytime_comparison(*played)
        assert found["n_rounds"] == count
        wrong += found["better"] == "before" or (
            found["better"] == "after" and np.mean(first) == np.mean(second)
        )
    assert wrong <= 0.05 * repeats + 3 * (0.05 * 0.95 * repeats) ** 0.5


def test_a_round_is_a_seed_in_all_tasks() -> None:
    """In whatever order the file lists them; a seed that some task lacks is left out."""
    before = episodes({(task, seed): False for task in ("push", "pull") for seed in range(20)})
    after = episodes(
        {(task, seed): task == "push" for task in ("push", "pull") for seed in range(20)}
        | {("push", 20): True}
    )
    found = paired_episodes([*before, *episodes({("push", 20): True})], after)["anytime"]
    assert found["n_rounds"] == 20 and found == paired_episodes(before[::-1], after)["anytime"]
    expected = decide_paired(np.full(20, 0.5))
    assert (found["better"], found["decided_after"], found["p_value"]) == (
        "after",
        expected.rounds,
        expected.p_value,
    )
    assert found["pc_difference_ci95"] == pytest.approx(
        [100 * each for each in confidence_sequence(np.full(20, 0.5))]
    )
    assert paired_episodes(after[::-1], before)["anytime"]["better"] == "before"


def test_every_round_has_one_episode_of_each_task() -> None:
    """Also where tasks have other seeds and other numbers of them: the fewest count, and seeds of all tasks come first."""
    before = episodes(
        {("push", seed): False for seed in range(30)}
        | {("pull", seed): True for seed in range(5, 25)}
    )
    after = episodes(
        {("push", seed): True for seed in range(100, 112)}
        | {("pull", seed): seed < 205 for seed in range(200, 260)}
    )
    found = anytime_comparison(before, after)
    expected = np.array(
        [0.5] * 5 + [0.0] * 7
    )  # push is always gained; pull, from its sixth seed on, lost
    assert found["n_rounds"] == 12 and found["p_value"] == decide_paired(expected).p_value
    first = episodes(
        {("push", seed): seed % 2 == 0 for seed in range(1, 41)}
        | {("pull", seed): seed % 2 == 0 for seed in range(40)}
    )
    none = episodes({(task, seed): False for task in ("push", "pull") for seed in range(41)})
    rounds = np.array(
        [float(seed % 2 == 0) for seed in range(1, 40)]
    )  # the same outcome in both tasks, so no round is in between
    assert anytime_comparison(none, first)["p_value"] == pytest.approx(
        decide_paired(np.append(rounds, 1.0)).p_value
    )

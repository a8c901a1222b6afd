"""Statistics of success: intervals for a rate, and paired comparison of two policies.

Functions take and return fractions in [0, 1]; values under keys that start with ``pc_`` are
percent.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

from rlinf_vla.config.recipe import MODES, NO_PROBE
from rlinf_vla.evaluation.sequential import confidence_sequence, decide_paired

Episode = dict[str, Any]
"""An episode of a result: the values of ``EpisodeResult.row``; in a sweep also policy and suite."""


def task_of(episode: Episode) -> str:
    """Return the name of an episode's task, with its suite if it has one."""
    return f"{episode['suite']}: {episode['task']}" if "suite" in episode else str(episode["task"])


def by_task(episodes: Sequence[Episode]) -> dict[str, dict[int, bool]]:
    """Return task -> seed -> success. Raises ValueError if an episode is there twice."""
    outcomes: dict[str, dict[int, bool]] = {}
    for episode in episodes:
        task = task_of(episode)
        if episode["seed"] in outcomes.setdefault(task, {}):
            raise ValueError(f"seed {episode['seed']} of {task} twice")
        outcomes[task][episode["seed"]] = bool(episode["success"])
    return outcomes


def wilson_interval(successes: float, n: float, confidence: float = 0.95) -> tuple[float, float]:
    """Return the two-sided Wilson score interval of a success rate; (0, 1) without episodes.

    (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n): Wilson, "Probable inference, the law of
    succession, and statistical inference", JASA 22 (1927) 209-212; method 3 of Newcombe, Statistics
    in Medicine 17 (1998) 857-872.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes in {n} episodes")
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rate = successes / n
    centre = rate + z * z / (2 * n)
    half = z * sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # Without successes or without failures a bound is exactly 0 or 1; rounding would miss it.
    low = 0.0 if successes == 0 else (centre - half) / (1 + z * z / n)
    high = 1.0 if successes == n else (centre + half) / (1 + z * z / n)
    return low, high


def mcnemar_exact(before: Sequence[bool], after: Sequence[bool]) -> float:
    """Return the two-sided p-value of "before and after succeed equally often".

    Both list the same episodes in the same order. Under the hypothesis, outcomes that changed are
    fair coin flips: McNemar, Psychometrika 12 (1947) 153-157, with the exact binomial tail,
    doubled.
    """
    _, gained, lost, _ = _paired_counts(before, after)
    changed = gained + lost
    # Integer arithmetic until the division: exact for any number of episodes.
    tail = sum(comb(changed, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / (1 << changed))


def paired_difference(
    before: Sequence[bool], after: Sequence[bool], confidence: float = 0.95
) -> tuple[float, tuple[float, float]]:
    """Return after - before in success rate and its two-sided interval, for paired episodes.

    Method 10 of Newcombe, "Improved confidence intervals for the difference between binomial
    proportions based on paired data", Statistics in Medicine 17 (1998) 2635-2650: combines the
    Wilson intervals of both rates using their correlation φ.
    """
    both, gained, lost, neither = _paired_counts(before, after)
    n = both + gained + lost + neither
    if n == 0:
        return 0.0, (-1.0, 1.0)
    rate_after, rate_before = (both + gained) / n, (both + lost) / n
    low_after, high_after = wilson_interval(both + gained, n, confidence)
    low_before, high_before = wilson_interval(both + lost, n, confidence)

    margins = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    covariance = both * neither - gained * lost
    if covariance > 0:  # the paper's continuity correction, for positive correlation only
        covariance_corrected = max(covariance - n / 2, 0.0)
    else:
        covariance_corrected = float(covariance)
    phi = covariance_corrected / sqrt(margins) if margins else 0.0

    difference = rate_after - rate_before
    down, up = rate_after - low_after, high_before - rate_before
    low = difference - sqrt(down * down - 2 * phi * down * up + up * up)
    down, up = rate_before - low_before, high_after - rate_after
    high = difference + sqrt(down * down - 2 * phi * down * up + up * up)
    return difference, (low, high)


def summary(episodes: Sequence[Episode], *parts: str) -> dict[str, Any]:
    """Summarise episodes under LeRobot's keys, and each part of them that has the same values.

    Keys: n_episodes, n_success, pc_success (percent), pc_success_ci95 [low, high] (percent,
    Wilson), and, if ``parts`` is suite, task: per_suite: suite -> the same with per_task: task ->
    the same. Names are in order of first appearance. Raises ValueError without episodes.
    """
    if len(episodes) == 0:
        raise ValueError("no episodes, so no success rate")
    n = len(episodes)
    won = sum(bool(episode["success"]) for episode in episodes)
    low, high = wilson_interval(won, n)
    result: dict[str, Any] = {
        "n_episodes": n,
        "n_success": won,
        "pc_success": 100 * won / n,
        "pc_success_ci95": [100 * low, 100 * high],
    }
    if parts:
        first, *rest = parts
        result[f"per_{first}"] = {
            name: summary(part, *rest) for name, part in grouped(episodes, first).items()
        }
    return result


def column_of(policy: str, probe: str) -> str:
    """Return the name in tables of a policy with ``probe``, one of PROBES or NO_PROBE."""
    return policy if probe == NO_PROBE else f"{policy} with {probe}"


def grouped(episodes: Sequence[Episode], by: str) -> dict[str, list[Episode]]:
    """Return the episodes by one of their values, in order of first appearance."""
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode[by], []).append(episode)
    return groups


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return ``evaluation/comparison.json``: :func:`paired_episodes` per mode in both documents."""
    both = [mode for mode in MODES if mode in before and mode in after]
    comparisons = {
        mode: paired_episodes(before[mode]["episodes"], after[mode]["episodes"]) for mode in both
    }
    return {mode: block for mode, block in comparisons.items() if block}


def count_cut(episodes: Sequence[Episode]) -> int:
    """Return how many episodes were cut because a simulator failed; they count as failures."""
    return sum("fault" in episode for episode in episodes)


def paired_episodes(before: Sequence[Episode], after: Sequence[Episode]) -> dict[str, Any]:
    """Compare two policies on the episodes that both played; empty if there are none.

    Keys: n_pairs, n_gained (failed before, succeeds after), n_lost (the reverse), pc_difference
    (percentage points, after - before), pc_difference_ci95, p_value of "no difference" (McNemar,
    exact), and ``anytime``: see ``anytime_comparison``. The others hold for a number of episodes
    that was fixed before the first one.
    """
    first, second = (
        {(task_of(episode), episode["seed"]): episode for episode in episodes}
        for episodes in (before, after)
    )
    shared = [episode for episode in first if episode in second]
    if not shared:
        return {}
    pairs = [first[episode] for episode in shared], [second[episode] for episode in shared]
    outcomes = (
        [bool(episode["success"]) for episode in pairs[0]],
        [bool(episode["success"]) for episode in pairs[1]],
    )
    _, gained, lost, _ = _paired_counts(*outcomes)
    difference, (low, high) = paired_difference(*outcomes)
    return {
        "n_pairs": len(shared),
        "n_gained": gained,
        "n_lost": lost,
        "pc_difference": 100 * difference,
        "pc_difference_ci95": [100 * low, 100 * high],
        "p_value": mcnemar_exact(*outcomes),
        "anytime": anytime_comparison(*pairs),
    }


def anytime_comparison(before: Sequence[Episode], after: Sequence[Episode]) -> dict[str, Any]:
    """Compare two policies so that the result holds whenever the evaluation is stopped.

    Both have played the same tasks. A round is one episode of each policy in every task, and counts
    as the mean over the tasks of after - before, so that no task weighs more than another at any
    time. There are as many rounds as episodes of the task with the fewest; others are left out.
    Keys: n_rounds, better ("before" or "after", None: undecided), decided_after (rounds), p_value,
    and pc_difference_ci95 (percentage points), see ``evaluation/sequential.py``.
    """
    first, second = _in_order(before), _in_order(after)
    rounds = min(map(len, (*first, *second)))
    means = np.mean(
        [
            np.subtract(b[:rounds], a[:rounds], dtype=float)
            for a, b in zip(first, second, strict=True)
        ],
        axis=0,
    )
    interval = [100 * bound for bound in confidence_sequence(means)]
    return {"n_rounds": rounds} | decide_paired(means).document() | {"pc_difference_ci95": interval}


def _in_order(episodes: Sequence[Episode]) -> list[list[bool]]:
    """Return the outcomes of each task, tasks by name, in the order of the seeds.

    Seeds that all tasks have come first: the episodes of a seed may start alike in several tasks,
    so they belong to one round.
    """
    tasks = sorted(by_task(episodes).items())
    common = set.intersection(*(set(outcomes) for _, outcomes in tasks))
    return [
        [outcomes[seed] for seed in sorted(outcomes, key=lambda seed: (seed not in common, seed))]
        for _, outcomes in tasks
    ]


def _paired_counts(before: Sequence[bool], after: Sequence[bool]) -> tuple[int, int, int, int]:
    """Count the episodes that succeeded in both, were gained, were lost, or failed in both."""
    pairs = [(bool(first), bool(second)) for first, second in zip(before, after, strict=True)]
    return (
        pairs.count((True, True)),
        pairs.count((False, True)),
        pairs.count((True, False)),
        pairs.count((False, False)),
    )

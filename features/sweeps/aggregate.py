"""Success over training runs, tasks and episodes: intervals, profiles, time to success.

Rates are fractions. Bootstrap intervals are percentile intervals, and a function of their
arguments alone: the random numbers are seeded. A bootstrap of few runs is too narrow, so with two
or more runs an interval is never narrower than Student's t over the runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from rlinf_vla.evaluation.statistics import Episode, by_task, wilson_interval

Array = NDArray[np.float64]
Interval = tuple[float, float]

RESAMPLES = 2000
CONFIDENCE = 0.95
TRIMMED = 0.25
"""Share of the scores that an interquartile mean leaves out at each end."""


class Outcomes:
    """Outcomes of all episodes of a method, by training run (or seed), task and episode.

    ``success``: of each task, float64 ``[R, K]``; NaN where a run did not play an episode.
    ``seeds``: of each task, the ``K`` seeds of its episodes in ascending order.
    """

    def __init__(self, runs: Sequence[Sequence[Episode]]) -> None:
        """Raises ValueError without episodes, if the runs played different tasks, or if a run
        played an episode twice."""
        successes = [by_task(run) for run in runs]
        if not successes or not all(successes):
            raise ValueError("no episodes")
        self.tasks = sorted(successes[0])
        for by_seed in successes:
            if sorted(by_seed) != self.tasks:
                raise ValueError(f"tasks {self.tasks} and {sorted(by_seed)}")
        self.seeds = [sorted(set().union(*(run[task] for run in successes))) for task in self.tasks]
        self.success = [
            np.array(
                [[run[task].get(seed, np.nan) for seed in seeds] for run in successes], dtype=float
            )
            for task, seeds in zip(self.tasks, self.seeds, strict=True)
        ]

    @property
    def won(self) -> NDArray[np.int64]:
        """Number of successes ``[R, M]``."""
        return np.stack([np.nansum(success, axis=1) for success in self.success], axis=1).astype(
            np.int64
        )

    @property
    def played(self) -> NDArray[np.int64]:
        """Number of episodes ``[R, M]``."""
        return np.stack([np.isfinite(success).sum(1) for success in self.success], axis=1)

    @property
    def scores(self) -> Array:
        """Success rates, float64 ``[R, M]``."""
        return self.won / self.played

    def of(self, tasks: Sequence[str]) -> Outcomes:
        """Return the outcomes of some of ``tasks``."""
        part = copy(self)
        columns = [self.tasks.index(task) for task in tasks]
        part.tasks = list(tasks)
        part.seeds = [self.seeds[c] for c in columns]
        part.success = [self.success[c] for c in columns]
        return part


def _resamples(methods: Sequence[Outcomes], seed: int) -> list[Array]:
    """Return RESAMPLES mean success rates of each method, all of equal tasks.

    Runs and tasks are drawn with replacement, and episodes get random weights. A task and the
    weight of an episode (its task and seed) are the same for all runs and methods, because a
    difficult one is difficult for all of them. Of crossed factors, each is resampled by itself:
    Owen, "The pigeonhole bootstrap", Annals of Applied Statistics 1 (2007) 386-411, whose variance
    is never too small. Weights are exponential: Rubin, "The Bayesian bootstrap", Annals of
    Statistics 9 (1981) 130-134. Half a success and half a failure, spread over all runs and tasks,
    are added to the episodes, so that of one run and task this is the Jeffreys interval, and
    outcomes that are all equal do not make it a point.
    """
    generator = np.random.default_rng(seed)
    tasks = len(methods[0].tasks)
    rates = [np.empty((RESAMPLES, len(method.success[0]), tasks)) for method in methods]
    for column in range(tasks):
        seeds = sorted(set().union(*(method.seeds[column] for method in methods)))
        weights = generator.standard_exponential((RESAMPLES, len(seeds)))
        for method, rate in zip(methods, rates, strict=True):
            weight = weights[:, np.searchsorted(seeds, method.seeds[column])]
            success = method.success[column]
            more = generator.standard_gamma(0.5 / rate[0].size, (2, *rate.shape[:2]))
            rate[..., column] = (weight @ np.nan_to_num(success).T + more[0]) / (
                weight @ np.isfinite(success).T + more.sum(0)
            )
    task = generator.integers(tasks, size=(RESAMPLES, 1, tasks))
    return [
        _drawn_mean(by_run, generator.integers(by_run.shape[1], size=by_run.shape))
        for by_run in (_drawn_mean(r, task) for r in rates)
    ]


def _drawn_mean(values: Array, drawn: NDArray[np.int64]) -> Array:
    """Return the mean of the values drawn along the last axis of N; its variance is unbiased.

    That of N values drawn from N is too small by (N - 1) / N.
    """
    count = values.shape[-1]
    mean = values.mean(-1)
    chosen = np.take_along_axis(values, np.broadcast_to(drawn, values.shape), -1).mean(-1)
    return np.asarray(mean + np.sqrt(count / max(1, count - 1)) * (chosen - mean))


def hierarchical_interval(outcomes: Outcomes, seed: int = 0) -> tuple[float, Interval]:
    """Return the mean success rate over runs and tasks, and its interval.

    The interval includes what other runs, tasks and episodes would have changed. One run says
    nothing of other runs, nor does one task of others. With several runs it contains Student's t
    interval of their means.
    """
    mean = float(outcomes.scores.mean())
    low, high = _widened(
        _interval(_resamples([outcomes], seed)[0]), mean, _half_width([_variance(outcomes)])
    )
    return mean, (0.0 if mean == 0 else max(0.0, low), 1.0 if mean == 1 else min(1.0, high))


def success(outcomes: Outcomes) -> dict[str, Any]:
    """Return ``pc_success`` and ``pc_success_ci95`` of ``hierarchical_interval``, in percent."""
    mean, interval = hierarchical_interval(outcomes)
    return {"pc_success": 100 * mean, "pc_success_ci95": [100 * end for end in interval]}


def hierarchical_difference(
    before: Outcomes, after: Outcomes, seed: int = 0
) -> tuple[float, Interval]:
    """Return after - before in mean success rate, and its interval; both resample equal tasks and
    episodes.

    Runs are resampled independently. With several runs of a method it contains Welch's t interval.
    Raises ValueError if the tasks differ.
    """
    if before.tasks != after.tasks:
        raise ValueError(f"tasks {before.tasks} and {after.tasks}")
    first, second = _resamples([before, after], seed)
    difference = float(after.scores.mean() - before.scores.mean())
    low, high = _widened(
        _interval(second - first), difference, _half_width([_variance(before), _variance(after)])
    )
    return difference, (max(-1.0, low), min(1.0, high))


def _variance(outcomes: Outcomes) -> tuple[float, float]:
    """Return the variance of the mean success rate, and its degrees of freedom.

    Of several runs, that of their means; of one, the binomial variance of its episodes.
    """
    scores = outcomes.scores
    runs = len(outcomes.success[0])
    if runs > 1:
        return float(scores.mean(1).var(ddof=1)) / runs, runs - 1
    return float((scores * (1 - scores) / outcomes.played).sum()) / scores.size**2, np.inf


def _half_width(variances: Sequence[tuple[float, float]]) -> float:
    """Return half the width of a t interval, from the ``_variance`` of each method; 0 if each has
    one run.

    The degrees of freedom of a difference are those of Welch, "The generalization of 'Student's'
    problem when several different population variances are involved", Biometrika 34 (1947) 28-35,
    and of Satterthwaite, Biometrics Bulletin 2 (1946) 110-114.
    """
    if all(np.isinf(freedom) for _, freedom in variances):
        return 0.0
    total = sum(variance for variance, _ in variances)
    unsure = sum(variance**2 / freedom for variance, freedom in variances)
    return float(stdtrit(total**2 / unsure if unsure else np.inf, _QUANTILES[1]) * np.sqrt(total))


def interquartile_mean(scores: Array) -> Array:
    """Return the mean of the middle half of ``scores`` ``[..., R, M]``, of all runs and tasks.

    Agarwal et al., "Deep reinforcement learning at the edge of the statistical precipice" (arXiv
    2108.13264), whose rliable takes ``scipy.stats.trim_mean(scores, 0.25)``: of n scores, the
    floor(n / 4) lowest and as many of the highest are left out.
    """
    flat = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = int(TRIMMED * flat.shape[-1])
    return np.asarray(flat[..., cut : flat.shape[-1] - cut].mean(-1))


def performance_profile(scores: Array, thresholds: Array) -> Array:
    """Return the share of runs and tasks whose score is above each threshold: ``[..., len]``.

    The score distribution of Agarwal et al., section 4.2; ``scores`` ``[..., R, M]``.
    """
    return (scores[..., None] > thresholds).mean((-3, -2))


def interquartile_interval(outcomes: Outcomes) -> Interval:
    """Return the interval of the interquartile mean, of several runs.

    Student's t interval of the runs' own interquartile means, widened to contain Wilson's of the
    distinct episodes in the middle half. The stratified bootstrap of Agarwal et al. takes the tasks
    of a run for independent, and covers too little.
    """
    scores = outcomes.scores
    own = interquartile_mean(scores[:, None])
    episodes = (1 - 2 * TRIMMED) * sum(map(len, outcomes.seeds))
    low, high = wilson_interval(float(interquartile_mean(scores)) * episodes, episodes)
    low, high = _widened(
        (low, high),
        float(own.mean()),
        _half_width([(float(own.var(ddof=1)) / len(own), len(own) - 1)]),
    )
    return max(0.0, low), min(1.0, high)


def profile_interval(above: Array, runs: int) -> list[Interval]:
    """Return the interval of each share of a performance profile of so many runs.

    Wilson's, which takes a run for one draw: its tasks may rise and fall together.
    """
    return [wilson_interval(share * runs, runs) for share in above]


def time_to_success(
    episodes: Sequence[Episode], limit: int, points: int = 50
) -> dict[str, list[float]]:
    """Return the share of episodes that succeeded within t control steps, for up to ``points`` t.

    Keys: steps (the last is ``limit``), pc_solved, and pc_low and pc_high, the Wilson interval at
    that t. An episode ends at its first success, so its ``steps`` are its time to success. Raises
    ValueError without episodes.
    """
    if not episodes:
        raise ValueError("no episodes")
    steps = np.unique(np.linspace(1, limit, min(points, limit)).round().astype(int))
    times = np.array([episode["steps"] if episode["success"] else np.inf for episode in episodes])
    solved = [int((times <= step).sum()) for step in steps]
    bounds = [wilson_interval(count, len(times)) for count in solved]
    return {
        "steps": steps.tolist(),
        "pc_solved": [100 * count / len(times) for count in solved],
        "pc_low": [100 * low for low, _ in bounds],
        "pc_high": [100 * high for _, high in bounds],
    }


_QUANTILES = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)


def _interval(values: Array) -> Interval:
    low, high = np.quantile(values, _QUANTILES)
    return float(low), float(high)


def _widened(interval: Interval, centre: float, half_width: float) -> Interval:
    """Return the interval widened to contain ``centre`` ± ``half_width``, if that is not 0."""
    low, high = interval
    return (
        (low, high)
        if half_width == 0
        else (min(low, centre - half_width), max(high, centre + half_width))
    )

"""Success over training runs, tasks and episodes: bootstrap intervals, profiles, time to success.

Rates are fractions. Bootstrap intervals are percentile intervals, and a function of their
arguments alone: the random numbers are seeded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.evaluation.statistics import Episode, grouped, wilson_interval

Array = NDArray[np.float64]
Interval = tuple[float, float]

RESAMPLES = 2000
CONFIDENCE = 0.95
TRIMMED = 0.25
"""Share of the scores that an interquartile mean leaves out at each end."""


class Outcomes:
    """Outcomes of all episodes of a method, by training run (or seed) and task.

    ``won`` and ``played``: int64 ``[R, M]``, successes and episodes of each run in each task.
    """

    def __init__(self, runs: Sequence[Sequence[Episode]]) -> None:
        """Raises ValueError without episodes, or if the runs played different tasks."""
        by_task = [_by_task(run) for run in runs]
        if not by_task or not all(by_task):
            raise ValueError("no episodes")
        self.tasks = sorted(by_task[0])
        for each in by_task:
            if sorted(each) != self.tasks:
                raise ValueError(f"tasks {self.tasks} and {sorted(each)}")
        self.won = np.array([[sum(bool(e["success"]) for e in run[task]) for task in self.tasks] for run in by_task])
        self.played = np.array([[len(run[task]) for task in self.tasks] for run in by_task])

    @property
    def scores(self) -> Array:
        """Success rates, float64 ``[R, M]``."""
        return self.won / self.played

    def of(self, tasks: Sequence[str]) -> Outcomes:
        """Return the outcomes of some of ``tasks``."""
        found, columns = copy(self), [self.tasks.index(task) for task in tasks]
        found.tasks, found.won, found.played = list(tasks), self.won[:, columns], self.played[:, columns]
        return found

    def hierarchical_resamples(self, generator: np.random.Generator, tasks: NDArray[np.int64] | None = None) -> Array:
        """Return RESAMPLES mean success rates: runs and tasks are drawn with replacement, and
        episodes in each run and task. ``tasks`` int64 ``[RESAMPLES, 1, M]``: the tasks drawn,
        which a comparison shares; None: they are drawn here.

        Every run has the same tasks, so all runs of a resample have the tasks that were drawn.
        Resampling n episodes of which k succeeded is a binomial draw (n, k / n). Hierarchical
        bootstrap: Davison and Hinkley, "Bootstrap methods and their application" (1997), chapter 3.
        """
        count, number = self.won.shape
        run = generator.integers(count, size=(RESAMPLES, count, 1))
        task = drawn_tasks(generator, number) if tasks is None else tasks
        played, won = self.played[run, task], self.won[run, task]
        return np.asarray((generator.binomial(played, won / played) / played).mean((1, 2)))


def drawn_tasks(generator: np.random.Generator, tasks: int) -> NDArray[np.int64]:
    return generator.integers(tasks, size=(RESAMPLES, 1, tasks))


def _by_task(episodes: Sequence[Episode]) -> dict[str, list[Episode]]:
    return grouped([each | {"task": f"{each['suite']}: {each['task']}" if "suite" in each else each["task"]} for each in episodes], "task")


def hierarchical_interval(outcomes: Outcomes, seed: int = 0) -> tuple[float, Interval]:
    """Return the mean success rate over runs and tasks, and its interval.

    The interval includes what other runs, tasks and episodes would have changed. One run says
    nothing of other runs, nor does one task of others.
    """
    return float(outcomes.scores.mean()), _interval(outcomes.hierarchical_resamples(np.random.default_rng(seed)))


def success(outcomes: Outcomes) -> dict[str, Any]:
    """Return ``pc_success`` and ``pc_success_ci95`` of ``hierarchical_interval``, in percent."""
    mean, interval = hierarchical_interval(outcomes)
    return {"pc_success": 100 * mean, "pc_success_ci95": [100 * end for end in interval]}


def hierarchical_difference(before: Outcomes, after: Outcomes, seed: int = 0) -> tuple[float, Interval]:
    """Return after - before in mean success rate, and its interval; both resample equal tasks.

    Runs are resampled independently. Raises ValueError if the tasks differ.
    """
    if before.tasks != after.tasks:
        raise ValueError(f"tasks {before.tasks} and {after.tasks}")
    generator = np.random.default_rng(seed)
    tasks = drawn_tasks(generator, len(before.tasks))
    resamples = [each.hierarchical_resamples(generator, tasks) for each in (before, after)]
    return float(after.scores.mean() - before.scores.mean()), _interval(resamples[1] - resamples[0])


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


def stratified_interval(statistic: Callable[[Array], Array], scores: Array, seed: int = 0) -> tuple[Array, Array]:
    """Return the interval of ``statistic(scores)``, scores ``[R, M]``: its low and its high ends.

    The stratified bootstrap of Agarwal et al.: runs are drawn with replacement in each task by
    itself. It needs several runs.
    """
    generator = np.random.default_rng(seed)
    run = generator.integers(len(scores), size=(RESAMPLES, *scores.shape))
    low, high = np.quantile(statistic(scores[run, np.arange(scores.shape[1])]), _QUANTILES, axis=0)
    return low, high


def time_to_success(episodes: Sequence[Episode], limit: int, points: int = 50) -> dict[str, list[float]]:
    """Return the share of episodes that succeeded within t control steps, for up to ``points`` t.

    Keys: steps (the last is ``limit``), pc_solved, and pc_low and pc_high, the Wilson interval at
    that t. An episode ends at its first success, so its ``steps`` are its time to success. Raises
    ValueError without episodes.
    """
    if not episodes:
        raise ValueError("no episodes")
    steps = np.unique(np.linspace(1, limit, min(points, limit)).round().astype(int))
    times = np.array([each["steps"] if each["success"] else np.inf for each in episodes])
    solved = [int((times <= step).sum()) for step in steps]
    bounds = [wilson_interval(each, len(times)) for each in solved]
    return {
        "steps": steps.tolist(),
        "pc_solved": [100 * each / len(times) for each in solved],
        "pc_low": [100 * low for low, _ in bounds],
        "pc_high": [100 * high for _, high in bounds],
    }


_QUANTILES = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)


def _interval(values: Array) -> Interval:
    low, high = np.quantile(values, _QUANTILES)
    return float(low), float(high)

"""Simulate the intervals of ``rlinf-vla compare`` over few training runs: how often they cover.

python studies/coverage_study.py [--repeats 200]

A run has success rates sigmoid(spread z + 0.5 z'), z of the run and z' of the run and task, and
plays EPISODES of TASKS tasks. Prints the coverage and half the mean width in points, as in
docs/evaluation.md.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.features.sweeps import aggregate
from rlinf_vla.features.sweeps.aggregate import (
    Interval,
    Outcomes,
    hierarchical_difference,
    hierarchical_interval,
    interquartile_interval,
    interquartile_mean,
    performance_profile,
    profile_interval,
)

RUNS = (2, 3, 5, 10)
SPREADS = (0.5, 1.0, 1.5)
"""Standard deviations between runs, in logits: of rates 11, 20 and 26 points."""
TASKS, EPISODES = 4, 100
OFFSET = 0.5
"""Logit of the mean run."""
THRESHOLD = 0.605
"""Success rate at which the performance profile is taken; no run of 100 episodes has it."""
NAMES = ("mean success", "difference of two methods", "interquartile mean", "performance profile")


def rates(generator: np.random.Generator, spread: float, *shape: int) -> NDArray[np.float64]:
    """Return success rates ``[*shape, TASKS]``."""
    logits = (
        OFFSET
        + spread * generator.normal(size=(*shape, 1))
        + 0.5 * generator.normal(size=(*shape, TASKS))
    )
    return np.asarray(1 / (1 + np.exp(-logits)))


def outcomes(generator: np.random.Generator, spread: float, runs: int) -> Outcomes:
    won = generator.random((EPISODES, runs, TASKS)) < rates(generator, spread, runs)
    return Outcomes(
        [
            [
                {"task": str(task), "seed": seed, "success": won[seed, run, task]}
                for task in range(TASKS)
                for seed in range(EPISODES)
            ]
            for run in range(runs)
        ]
    )


def intervals(first: Outcomes, second: Outcomes, seed: int) -> tuple[Interval, ...]:
    """Return those of NAMES."""
    above = performance_profile(first.scores, np.array([THRESHOLD]))
    return (
        hierarchical_interval(first, seed)[1],
        hierarchical_difference(first, second, seed)[1],
        interquartile_interval(first),
        profile_interval(above, len(first.scores))[0],
    )


def row(spread: float, runs: int, repeats: int) -> NDArray[np.float64]:
    """Return coverage and mean width of each interval, ``[len(NAMES), 2]``."""
    generator = np.random.default_rng(runs)
    many = rates(generator, spread, 100_000)
    scores = generator.binomial(EPISODES, many) / EPISODES
    above = performance_profile(scores, np.array([THRESHOLD]))[0]
    truth = np.array([many.mean(), 0.0, interquartile_mean(many), above])
    bounds = np.array(
        [
            intervals(outcomes(generator, spread, runs), outcomes(generator, spread, runs), seed)
            for seed in range(repeats)
        ]
    )
    low, high = bounds[..., 0], bounds[..., 1]
    return np.stack([((low <= truth) & (truth <= high)).mean(0), (high - low).mean(0)], axis=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=200)
    repeats = parser.parse_args().repeats
    aggregate.RESAMPLES = 400  # of 2000, for speed
    rows = {(runs, spread): row(spread, runs, repeats) for runs in RUNS for spread in SPREADS}
    print(f"| interval of | runs | {' | '.join(f'spread {spread:g}' for spread in SPREADS)} |")
    print(f"|---|---|{'---|' * len(SPREADS)}")
    for number, name in enumerate(NAMES):
        for runs in RUNS:
            cells = (rows[runs, spread][number] for spread in SPREADS)
            print(
                f"| {name} | {runs} | {' | '.join(f'{100 * covers:.0f} %, ±{50 * width:.0f}' for covers, width in cells)} |"
            )


if __name__ == "__main__":
    main()

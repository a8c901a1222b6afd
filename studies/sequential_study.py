"""Simulate the sequential comparison of two policies: errors, power, episodes saved.

python studies/sequential_study.py [--repeats 10000] [--page PAGE.md]

Pairs of policies are those whose paired counts are in docs/results/*.md ("+21.0 points (...): 59
gained, 17 lost"), in a random order that is drawn REPEATS times, and simulated ones.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.evaluation.sequential import ALPHA, BETS, paired_evidence
from rlinf_vla.evaluation.statistics import wilson_interval

RESULTS = Path(__file__).parents[1] / "docs" / "results"
RECORDED = re.compile(
    r"\+(?P<points>[\d.]+) points[^|]*?: (?P<gained>\d+) gained, (?P<lost>\d+) lost"
)
LENGTH = 1000
"""Pairs of a simulation without a difference."""
PART = 500
"""Simulations computed at once."""
NULLS = {
    "one in two differs": (0.25, 0.25, 0.25, 0.25),
    "all differ": (0.0, 0.5, 0.5, 0.0),
    "one in twenty differs": (0.85, 0.025, 0.025, 0.1),
}
"""Probabilities of: both succeed, gained, lost, both fail; the two rates are equal."""
UNEQUAL = (
    (40, 20, (0.9, 0.3), (0.5, 0.9)),
    (40, 100, (0.9, 0.3), (0.5, 0.9)),
    (90, 10, (0.8, 0.5), (0.6, 0.75)),
    (10, 100, (0.95, 0.05), (0.05, 0.95)),
    (4, 500, (0.9, 0.5), (0.7, 0.7)),
    (2, 500, (0.9, 0.5), (0.7, 0.7)),
    (2, 500, (0.9, 0.3), (0.5, 0.8)),
)
"""Tasks, episodes of each, and each policy's rates in the first and second half of the tasks."""

Array = NDArray[np.float64]


class Pair(NamedTuple):
    """Recorded counts of two policies on the same episodes."""

    where: str
    episodes: int
    gained: int
    lost: int


def recorded_pairs() -> Iterator[Pair]:
    """Yield the pairs that the pages of results state; the number of episodes follows from them."""
    for page in sorted(RESULTS.glob("*.md")):
        for match in RECORDED.finditer(page.read_text()) if page.name != "sequential.md" else ():
            gained, lost = int(match["gained"]), int(match["lost"])
            yield Pair(
                page.name, round(100 * (gained - lost) / float(match["points"])), gained, lost
            )


def drawn(
    cells: Sequence[float], length: int, repeats: int, seed: int
) -> Iterator[tuple[Array, Array]]:
    """Yield outcomes before and after, ``[PART, length]``, ``repeats`` in all."""
    generator = np.random.default_rng(seed)
    for _ in range(repeats // PART):
        kind = generator.choice(4, (PART, length), p=cells)
        yield np.isin(kind, (0, 2)).astype(float), np.isin(kind, (0, 1)).astype(float)


def permuted(pair: Pair, repeats: int, seed: int) -> Iterator[Array]:
    """Yield the gains of a recorded pair in random orders, ``[PART, episodes]``."""
    generator = np.random.default_rng(seed)
    gains = np.array(
        [1.0] * pair.gained + [-1.0] * pair.lost + [0.0] * (pair.episodes - pair.gained - pair.lost)
    )
    for _ in range(repeats // PART):
        yield generator.permuted(np.tile(gains, (PART, 1)), axis=1)


class CountedEvidence:
    """``paired_evidence`` of episodes one by one, looked up by the numbers gained and lost."""

    def __init__(self, most: int) -> None:
        gained, lost = np.mgrid[: most + 1, : most + 1]
        wealth = sum(
            np.exp(np.minimum(700, gained * np.log1p(bet) + lost * np.log1p(-bet))) for bet in BETS
        ) / len(BETS)
        self._table: Array = np.log(wealth)

    def __call__(self, gains: Array) -> Array:
        evidence = self._table[np.cumsum(gains > 0, axis=-1), np.cumsum(gains < 0, axis=-1)]
        assert np.allclose(evidence[0], paired_evidence(gains[0]))
        return np.asarray(evidence)


def reached(evidence: Array) -> Array:
    """Return the number of episodes after which each row decides; infinity if it never does."""
    there = evidence >= np.log(2 / ALPHA)
    return np.where(there.any(-1), there.argmax(-1) + 1.0, np.inf)


def mcnemar(gained: NDArray[np.int64], lost: NDArray[np.int64]) -> Array:
    """Return the exact two-sided p-values of many counts."""
    changed = gained + lost
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, changed.max() + 2)))])
    p_values = np.empty(len(changed))
    for number in np.unique(changed):
        k = np.arange(number + 1)
        terms = np.exp(
            log_factorials[number]
            - log_factorials[k]
            - log_factorials[number - k]
            - number * np.log(2)
        )
        where = changed == number
        p_values[where] = np.minimum(1.0, 2 * np.cumsum(terms)[np.minimum(gained, lost)[where]])
    return p_values


def errors(repeats: int) -> list[str]:
    """Return a row for each case without a difference: the share of wrong decisions."""
    rows = []
    evidence = CountedEvidence(LENGTH)
    for number, (name, cells) in enumerate(NULLS.items()):
        wrong = {"paired": 0, "unpaired": 0, "McNemar": 0}
        for before, after in drawn(cells, LENGTH, repeats, number):
            paired = [reached(evidence(sign * (after - before))) for sign in (1, -1)]
            wrong["paired"] += int((np.minimum(*paired) < np.inf).sum())
            apart = np.roll(after, 1, axis=0) - before  # of another simulation: independent
            unpaired = [reached(evidence(sign * apart)) for sign in (1, -1)]
            wrong["unpaired"] += int((np.minimum(*unpaired) < np.inf).sum())
            looks = np.arange(10, LENGTH + 1, 10) - 1
            gained, lost = (
                np.cumsum(sign * (after - before) > 0, axis=1, dtype=np.int64)[:, looks]
                for sign in (1, -1)
            )
            p = mcnemar(gained.ravel(), lost.ravel()).reshape(gained.shape)
            wrong["McNemar"] += int((p < ALPHA).any(1).sum())
        total = repeats // PART * PART
        cells_of = [
            f"{100 * count / total:.1f} % ({interval(count, total)})" for count in wrong.values()
        ]
        rows.append(f"| {name} | {' | '.join(cells_of)} |")
    return rows


def unequal_rows(repeats: int) -> list[str]:
    """Return a row for each case of UNEQUAL: how often each policy is named better."""
    rows = []
    for number, (tasks, count, *halves) in enumerate(UNEQUAL):
        generator = np.random.default_rng(number)
        rates = [np.repeat(half, tasks // 2) for half in halves]
        named = np.zeros(2, int)
        for _ in range(repeats // PART):
            first, second = (
                (generator.random((PART, count, tasks)) < rate).astype(float) for rate in rates
            )
            gains = (second - first).mean(-1)
            times = [reached(paired_evidence(sign * gains)) for sign in (-1, 1)]
            named += [int((times[0] < times[1]).sum()), int((times[1] < times[0]).sum())]
        total = repeats // PART * PART
        cells = [f"{100 * wins / total:.1f} % ({interval(wins, total)})" for wins in named]
        descriptions = [f"{half[0]:g} and {half[1]:g}: {np.mean(half):g}" for half in halves]
        rows.append(f"| {tasks} × {count} | {' | '.join((*descriptions, *cells))} |")
    return rows


def interval(count: int, total: int) -> str:
    low, high = wilson_interval(count, total)
    return f"{100 * low:.1f} to {100 * high:.1f}"


def fixed_size(gained: float, lost: float, power: float, repeats: int, seed: int) -> int:
    """Return the smallest tested number of pairs at which McNemar's test has this power."""
    generator = np.random.default_rng(seed)
    size = 10
    while True:
        counts = generator.multinomial(size, [gained, lost, 1 - gained - lost], repeats)
        if (mcnemar(counts[:, 0], counts[:, 1]) < ALPHA).mean() >= power:
            return size
        size += max(2, size // 20)


def recorded_rows(repeats: int) -> list[str]:
    rows = []
    for number, pair in enumerate(recorded_pairs()):
        evidence = CountedEvidence(pair.gained + pair.lost)
        times = np.concatenate(
            [reached(evidence(gains)) for gains in permuted(pair, repeats, number)]
        )
        share = np.isfinite(times).mean()
        used = np.minimum(times, pair.episodes)
        need = fixed_size(pair.gained / pair.episodes, pair.lost / pair.episodes, 0.9, 4000, number)
        p = mcnemar(np.array([pair.gained]), np.array([pair.lost]))[0]
        rows.append(
            f"| {pair.where} | {pair.gained} / {pair.lost} of {pair.episodes} | {p:.0e} | {100 * share:.1f} % | {used.mean():.0f} "
            f"(90 % of orders: {np.quantile(used, 0.9):.0f}) | {100 * (1 - used.mean() / pair.episodes):.0f} % | {need} |"
        )
    return rows


def power_rows(repeats: int) -> list[str]:
    """Return a row for each true difference, with 15 % of the episodes lost."""
    rows = []
    for number, gain in enumerate((0.1, 0.15, 0.2, 0.3, 0.4)):
        gained = 0.15 + gain
        lost = 0.15
        need = fixed_size(gained, lost, 0.9, 4000, number)
        horizon = 4 * need
        evidence = CountedEvidence(horizon)
        both = (1 - gained - lost) / 2
        paired, unpaired = [], []
        for before, after in drawn(
            (both, gained, lost, 1 - gained - lost - both), horizon, min(repeats, 2000), number
        ):
            paired.append(reached(evidence(after - before)))
            unpaired.append(reached(evidence(after[::-1] - before)))
        cells = []
        for times in (np.concatenate(paired), np.concatenate(unpaired)):
            used = np.minimum(times, horizon)
            cells.append(
                f"{100 * (times <= need).mean():.0f} % | {np.median(used):.0f}, mean {used.mean():.0f}"
            )
        rows.append(f"| {100 * gain:.0f} | {need} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--repeats",
        type=int,
        default=10000,
        help="simulations of each case (10000), a multiple of 500",
    )
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    text = PAGE.format(
        date=f"{date.today():%-d %B %Y}",
        repeats=f"{arguments.repeats:,}",
        length=f"{LENGTH:,}",
        errors="\n".join(errors(arguments.repeats)),
        unequal="\n".join(unequal_rows(arguments.repeats)),
        recorded="\n".join(recorded_rows(arguments.repeats)),
        power="\n".join(power_rows(arguments.repeats)),
        simulations=f"{min(arguments.repeats, 2000):,}",
    )
    print(text)
    if arguments.page:
        arguments.page.write_text(text)


PAGE = """# Sequential comparison: errors, power, and episodes saved

{date}. Written by

```
python studies/sequential_study.py --page docs/results/sequential.md
```

The test is in `rlinf_vla/evaluation/sequential.py`, which cites its sources. It may be looked at
after every episode, and the evaluation may stop as soon as it decides: the probability that it ever
names the wrong policy is at most 5 %.

## Errors

Two policies with equal success rates, {length} episodes each, {repeats} simulations: the share in which a
policy was ever named better, with its 95 % interval (Wilson). The sequential tests look after every
episode, the exact McNemar test (p < 0.05) every ten episodes.

| outcomes | sequential, same episodes | sequential, independent episodes | repeated McNemar |
|---|---|---|---|
{errors}

## Tasks that differ

Independent episodes of each policy ({repeats} simulations). The first policy is ahead in the first
half of the tasks and behind in the second; after the rates of both halves comes their mean. A round
is one episode of each policy in every task, so that the order of the tasks cannot decide.

| tasks × episodes | first policy | second policy | first is named better | second is named better |
|---|---|---|---|---|
{unequal}

A round of many tasks counts once, however many episodes it has, because they may depend on each
other. A mean difference of d points therefore takes log(40) / log(1 + d / 100) rounds at the least:
39 of 10 points, 21 of 20 points. Play more episodes of each task, or fix their number and use the
interval of the difference.

## Episodes saved on recorded pairs

Pairs of policies of this repository, from the counts on their pages, also where the
gain is not significant: the recorded outcomes in {repeats} random orders. *Decided*: the share of orders in
which the better policy is named within the recorded episodes. *Episodes used*: the mean, with
undecided orders counted in full. *Fixed n*: pairs that McNemar's test needs for a power of 90 % if
the recorded shares are the true ones; that number is not known before the episodes have been run.

| page | gained / lost | p (McNemar) | decided | episodes used | saved of those recorded | fixed n |
|---|---|---|---|---|---|---|
{recorded}

## Power

Simulated pairs ({simulations} simulations each): 15 % of the episodes are lost, 15 % and the difference
gained. *Fixed n*: pairs at which McNemar's test has a power of 90 %. *Power*: of the sequential
tests within as many episodes. *Episodes*: until the decision (median, and mean with those undecided
after 4 n counted as 4 n). Unpaired: of independent episodes with the same rates.

| points | fixed n | power, paired | episodes, paired | power, unpaired | episodes, unpaired |
|---|---|---|---|---|---|
{power}

Peeking has its price: within the episodes that give McNemar's test a power of 90 %, the sequential
tests have less. Run on until they decide, the paired one needs fewer than that on average, without
knowing the difference in advance, and more in unlucky orders.
"""


if __name__ == "__main__":
    main()

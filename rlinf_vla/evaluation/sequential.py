"""Compare two policies with error bounds that hold however often the result is looked at.

The evidence against "the second policy is not better" is an e-process: a non-negative process that
starts at 1, and whose expectation is at most 1 under that hypothesis whenever one stops. By Ville's
inequality it ever exceeds 1/α with a probability of at most α. Ramdas, Grünwald, Vovk and Shafer,
"Game-theoretic statistics and safe anytime-valid inference", Statistical Science 38 (2023) 576-601.

Both directions are tested at α/2, so that a wrong decision has a probability of at most α in all.
Values are logarithms. Arrays are float64 ``[..., T]``, episodes in an order that does not depend on
their outcomes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

ALPHA = 0.05
BETS = (np.arange(32) + 0.5) / 32
"""Equally weighted fractions of the wealth that are bet at once."""
STEPS = 20
"""Bisections of a bound of a confidence sequence: to 2e-6."""


def paired_evidence(gains: Array) -> Array:
    """Return the log e-process against "the mean gain is at most 0", after each round.

    ``gains``: in [-1, 1], second - first policy in one episode of each, or the mean of that over
    the tasks of a round. Only the expectation of a round matters: its episodes may depend on each
    other, and the two policies may play different ones. The wealth of a bettor, Π (1 + λ gain),
    averaged over the fixed bets λ of BETS (the method of mixtures): Waudby-Smith and Ramdas,
    "Estimating means of bounded random variables by betting", JRSS B 86 (2024) 1-27. If each round
    is one episode, only those with different outcomes change it, and it is a test of fair coin
    flips, as McNemar's.
    """
    wealth = np.cumsum(np.log1p(BETS[:, None] * gains[..., None, :]), axis=-1)
    highest = wealth.max(axis=-2)
    return highest + np.log(np.exp(wealth - highest[..., None, :]).mean(axis=-2))


@dataclass(frozen=True)
class Decision:
    """What the evidence says after all rounds.

    ``better``: "second" or "first", or None while neither has been shown to be better.
    ``rounds``: after which that was known; None if undecided. ``p_value``: valid at any time.
    """

    better: str | None
    rounds: int | None
    p_value: float

    def document(self) -> dict[str, Any]:
        """Return it as JSON values, where better is "before" (first) or "after" (second)."""
        better = {"first": "before", "second": "after", None: None}[self.better]
        return {"better": better, "decided_after": self.rounds, "p_value": self.p_value}


def decide(for_second: Array, for_first: Array, alpha: float = ALPHA) -> Decision:
    """Return the decision of two log e-processes ``[T]``, one for each direction.

    The first to reach log(2/α) decides.
    """
    most = max(
        (float(process.max()) for process in (for_second, for_first) if len(process)), default=0.0
    )
    p_value = float(min(1.0, 2 * np.exp(-most)))
    reached = {
        name: np.flatnonzero(process >= np.log(2 / alpha))
        for name, process in (("second", for_second), ("first", for_first))
    }
    reached_first = sorted(
        (int(indices[0]), name) for name, indices in reached.items() if len(indices)
    )
    return (
        Decision(reached_first[0][1], reached_first[0][0] + 1, p_value)
        if reached_first
        else Decision(None, None, p_value)
    )


def decide_paired(gains: Array, alpha: float = ALPHA) -> Decision:
    """Return the decision on ``gains`` ``[T]``; see ``paired_evidence``."""
    return decide(paired_evidence(gains), paired_evidence(-gains), alpha)


def confidence_sequence(gains: Array, alpha: float = ALPHA) -> tuple[float, float]:
    """Return an interval for the mean gain, which all rounds so far have kept.

    The means that no earlier look has refuted at α/2 on their side: the hedged capital confidence
    sequence of Waudby-Smith and Ramdas, with bets of BETS / (1 + mean). It covers the truth at all
    times together with a probability of at least 1 - α. ``gains`` ``[T]``; (-1, 1) without rounds.
    """
    return _lower(gains, alpha), -_lower(-gains, alpha)


def _lower(gains: Array, alpha: float) -> float:
    low = -1.0
    high = 1.0
    if len(gains) == 0:
        return low
    for _ in range(STEPS):
        mean = (low + high) / 2
        if paired_evidence((gains - mean) / (1 + mean)).max() >= np.log(2 / alpha):
            low = mean
        else:
            high = mean
    return low

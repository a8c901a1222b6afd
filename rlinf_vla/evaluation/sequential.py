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
PRIOR = 0.18
"""Successes and failures that each rate starts with. The bound holds for any."""
STEPS = 20
"""Bisections of a bound of a confidence sequence: to 2e-6."""


def paired_evidence(gains: Array) -> Array:
    """Return the log e-process against "the mean gain is at most 0", after each round.

    ``gains``: in [-1, 1], second - first policy on the same episode, or the mean of that over the
    tasks of a round. The wealth of a bettor, Π (1 + λ gain), averaged over the fixed bets λ of BETS
    (the method of mixtures): Waudby-Smith and Ramdas, "Estimating means of bounded random variables
    by betting", JRSS B 86 (2024) 1-27. If each round is one episode, only those with different
    outcomes change it, and it is a test of fair coin flips, as McNemar's.
    """
    wealth = np.cumsum(np.log1p(BETS[:, None] * gains[..., None, :]), axis=-1)
    highest = wealth.max(axis=-2)
    return highest + np.log(np.exp(wealth - highest[..., None, :]).mean(axis=-2))


def unpaired_evidence(first: Array, second: Array) -> Array:
    """Return the log e-process against "the second policy's success rate is not higher".

    ``first`` and ``second``: outcomes, 0 or 1, of as many independent episodes of each policy. The
    e-variable of a block of one episode of each is p(y₁|a) p(y₂|b) / (p(y₁|m) p(y₂|m)) with the
    rates a and b that earlier blocks suggest, m = (a + b) / 2: Turner, Ly and Grünwald, "Generic
    E-variables for exact sequential k-sample tests that allow for optional stopping", Journal of
    Statistical Planning and Inference 230 (2024) 106116. Nothing is bet while b ≤ a. Then the
    expectation is at most 1 for all rates with second ≤ first: with u, v the two rates minus m and
    d = b - m ≥ 0, s = m (1 - m), it is (1 - u d / s)(1 + v d / s) ≤ 1 - (u d / s)² for v ≤ u.
    """
    number = np.arange(first.shape[-1])
    rates = [(np.cumsum(each, axis=-1) - each + PRIOR) / (number + 2 * PRIOR) for each in (first, second)]
    before, after = rates
    middle = (before + after) / 2
    gained = sum(np.log(np.where(y > 0, rate / middle, (1 - rate) / (1 - middle))) for y, rate in ((first, before), (second, after)))
    return np.cumsum(np.where(after > before, gained, 0.0), axis=-1)


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
    most = max((float(each.max()) for each in (for_second, for_first) if len(each)), default=0.0)
    p_value = float(min(1.0, 2 * np.exp(-most)))
    reached = {name: np.flatnonzero(each >= np.log(2 / alpha)) for name, each in (("second", for_second), ("first", for_first))}
    found = sorted((int(places[0]), name) for name, places in reached.items() if len(places))
    return Decision(found[0][1], found[0][0] + 1, p_value) if found else Decision(None, None, p_value)


def decide_paired(gains: Array, alpha: float = ALPHA) -> Decision:
    """Return the decision on ``gains`` ``[T]``; see ``paired_evidence``."""
    return decide(paired_evidence(gains), paired_evidence(-gains), alpha)


def decide_unpaired(first: Array, second: Array, alpha: float = ALPHA) -> Decision:
    """Return the decision on outcomes ``[T]`` of each policy; see ``unpaired_evidence``."""
    return decide(unpaired_evidence(first, second), unpaired_evidence(second, first), alpha)


def confidence_sequence(gains: Array, alpha: float = ALPHA) -> tuple[float, float]:
    """Return an interval for the mean gain, which all rounds so far have kept.

    The means that no earlier look has refuted at α/2 on their side: the hedged capital confidence
    sequence of Waudby-Smith and Ramdas, with bets of BETS / (1 + mean). It covers the truth at all
    times together with a probability of at least 1 - α. ``gains`` ``[T]``; (-1, 1) without rounds.
    """
    return _lower(gains, alpha), -_lower(-gains, alpha)


def _lower(gains: Array, alpha: float) -> float:
    low, high = -1.0, 1.0
    if len(gains) == 0:
        return low
    for _ in range(STEPS):
        mean = (low + high) / 2
        if paired_evidence((gains - mean) / (1 + mean)).max() >= np.log(2 / alpha):
            low = mean
        else:
            high = mean
    return low

"""What a control loop did with its time: counts, seconds of every section, ages of observations; as one JSON document."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from rlinf_vla.rollout.chunks import REJECTIONS

WINDOW = 36_000
"""Latest samples of each section that percentiles are of: an hour at 10 Hz."""
QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
BINS = 20
"""Of the histogram of when commands left: a tenth of a period each; what is later stands in one more."""

POLICY, HUMAN, HELD, STARTING, SKIPPED = STEPS = ("policy", "human", "held", "starting", "skipped")
"""What became of each control period. Policy, human: whose action was executed. Held: there was none. Starting: the same before the first
action of a run, while the arm stands anyway. Skipped: it was over before its tick could begin."""
ACCEPTED = "accepted"


class Accounting:
    """Of the runs of one loop; warm-up inferences are kept apart."""

    def __init__(self, control_hz: float) -> None:
        self.control_hz = control_hz
        self.steps: Counter[str] = Counter()
        self.chunks: Counter[str] = Counter()
        self.interventions: Counter[str] = Counter()
        self.warmup: list[float] = []
        self.seconds = 0.0
        self._sections: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._ages: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._left: Counter[int] = Counter()

    def took(self, section: str, seconds: float) -> None:
        self._sections[section].append(seconds)

    def age(self, name: str, seconds: float) -> None:
        """Of a sensor's newest measurement when it was read; of an ``action``, since its observation."""
        self._ages[name].append(seconds)

    def left(self, late: float) -> None:
        """A command left so many seconds after its tick was due."""
        self._left[min(int(late * self.control_hz * 10), BINS)] += 1

    @property
    def missed(self) -> int:
        """Periods in which the arm got no command though it should have."""
        return self.steps[HELD] + self.steps[SKIPPED]

    def document(self) -> dict[str, Any]:
        return {
            "control_hz": self.control_hz,
            "seconds": self.seconds,
            "warmup_ms": [1e3 * each for each in self.warmup],
            "steps": {name: self.steps[name] for name in STEPS},
            "missed": self.missed,
            "chunks": {name: self.chunks[name] for name in (ACCEPTED, *REJECTIONS)},
            "interventions": dict(sorted(self.interventions.items())),
            "sections_ms": {name: milliseconds(each) for name, each in self._sections.items()},
            "ages_ms": {name: milliseconds(each) for name, each in self._ages.items()},
            "left_per_tenth": [self._left[place] for place in range(BINS + 1)],
        }


def added(before: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """The counts of two processes' documents, one after the other, and the quantiles of the later; ``before`` may be of another rate, or
    none: it does not count then."""
    if before.get("control_hz") != document["control_hz"]:
        return document

    def counts(name: str) -> dict[str, int]:
        earlier, later = before[name], document[name]
        return {each: earlier.get(each, 0) + later.get(each, 0) for each in earlier | later}

    found = document | {name: before[name] + document[name] for name in ("seconds", "missed")}
    found |= {name: counts(name) for name in ("steps", "chunks", "interventions")}
    pairs = zip(before["left_per_tenth"], document["left_per_tenth"], strict=True)
    return found | {"left_per_tenth": [earlier + later for earlier, later in pairs]}


def milliseconds(seconds: Iterable[float]) -> dict[str, float]:
    """n, and the quantiles in ms."""
    values = 1e3 * np.fromiter(seconds, np.float64)
    return {"n": len(values), **{name: float(np.quantile(values, share)) for name, share in QUANTILES.items()}}

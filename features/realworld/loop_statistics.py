"""Collect statistics of a control loop: step counts, section times and observation ages."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from rlinf_vla.features.realworld.inference import REJECTIONS

WINDOW = 36_000
"""Number of latest samples per section that percentiles cover: an hour at 10 Hz."""
QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
BINS = 20
"""Histogram bins for command times, a tenth of a period each; one more bin holds later ones."""

POLICY, HUMAN, HELD, STARTING, SKIPPED = STEPS = ("policy", "human", "held", "starting", "skipped")
"""Outcome of each control period.
POLICY, HUMAN: whose action was executed. HELD: there was no action. STARTING: the same before the
policy's first action of a run or after a takeover. SKIPPED: over before its tick could begin."""
ACCEPTED = "accepted"


class LoopStatistics:
    """Statistics of one loop's runs; warm-up inferences are kept separately."""

    def __init__(self, control_hz: float) -> None:
        self.control_hz = control_hz
        self.steps: Counter[str] = Counter()
        self.chunks: Counter[str] = Counter()
        self.interventions: Counter[str] = Counter()
        self.delays: Counter[int] = Counter()
        """Ticks between an observation and its chunk -> number of inferences."""
        self.warmup: list[float] = []
        self.seconds = 0.0
        self._sections: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._ages: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._left: Counter[int] = Counter()

    def took(self, section: str, seconds: float) -> None:
        self._sections[section].append(seconds)

    def age(self, name: str, seconds: float) -> None:
        """Record the age in seconds of a sensor's measurement or of an action's observation."""
        self._ages[name].append(seconds)

    def left(self, late: float) -> None:
        """Record that a command was sent ``late`` seconds after its tick was due."""
        self._left[min(int(late * self.control_hz * 10), BINS)] += 1

    @property
    def missed(self) -> int:
        """Periods in which the arm should have received a command but did not."""
        return self.steps[HELD] + self.steps[SKIPPED]

    def document(self) -> dict[str, Any]:
        return {
            "control_hz": self.control_hz,
            "seconds": self.seconds,
            "warmup_ms": [1e3 * seconds for seconds in self.warmup],
            "steps": {name: self.steps[name] for name in STEPS},
            "missed": self.missed,
            "chunks": {name: self.chunks[name] for name in (ACCEPTED, *REJECTIONS)},
            "interventions": dict(sorted(self.interventions.items())),
            "delay_ticks": {str(ticks): count for ticks, count in sorted(self.delays.items())},
            "sections_ms": {
                name: milliseconds(samples) for name, samples in self._sections.items()
            },
            "ages_ms": {name: milliseconds(samples) for name, samples in self._ages.items()},
            "left_per_tenth": [self._left[index] for index in range(BINS + 1)],
        }


def merged_statistics(before: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """Add the counts of an earlier process's document to those of a later one.
    Quantiles are the later's. ``before`` is ignored if it is empty or of another control rate."""
    if before.get("control_hz") != document["control_hz"]:
        return document

    def counts(name: str) -> dict[str, int]:
        earlier, later = before[name], document[name]
        return {key: earlier.get(key, 0) + later.get(key, 0) for key in earlier | later}

    merged = document | {name: before[name] + document[name] for name in ("seconds", "missed")}
    merged |= {name: counts(name) for name in ("steps", "chunks", "interventions", "delay_ticks")}
    pairs = zip(before["left_per_tenth"], document["left_per_tenth"], strict=True)
    return merged | {"left_per_tenth": [earlier + later for earlier, later in pairs]}


def control_metrics(document: dict[str, Any]) -> dict[str, float]:
    """Return a document as metrics named ``control/...``, times in milliseconds."""
    metrics = {
        "control/missed": document["missed"],
        "control/interventions": sum(document["interventions"].values()),
    }
    metrics |= {
        f"control/{kind}_{name}": count
        for kind in ("steps", "chunks")
        for name, count in document[kind].items()
    }
    for kind, blocks in (("", document["sections_ms"]), ("age_", document["ages_ms"])):
        metrics |= {
            f"control/{kind}{name}_ms_{statistic}": block[statistic]
            for name, block in blocks.items()
            for statistic in ("p50", "p99", "max")
        }
    return metrics


def milliseconds(seconds: Iterable[float]) -> dict[str, float]:
    """Return the number of samples ``n`` and the quantiles, in milliseconds."""
    values = 1e3 * np.fromiter(seconds, np.float64)
    return {
        "n": len(values),
        **{name: float(np.quantile(values, share)) for name, share in QUANTILES.items()},
    }

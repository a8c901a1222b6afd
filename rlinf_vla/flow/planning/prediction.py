"""What a plan is predicted to take, told in numbers, words and a picture."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_vla.flow.planning.events import Played, Task
from rlinf_vla.flow.planning.plan import Plan
from rlinf_vla.telemetry.timeline import Span, Timeline

LETTERS = {"act": "a", "head": "a", "encode": "e", "value": "v", "simulate": "s", "reset": "r", "merge": "m", "reward": "w"}
LETTERS |= {
    "reference": "f",
    "update": "U",
    "all-reduce": "A",
    "trajectories": "t",
    "features": "t",
    "publish": "p",
    "load": "p",
    "switch": "x",
}
_PLACES = dict.fromkeys(("act", "head", "encode", "value", "merge"), "the policy in rollouts")
_PLACES |= {"simulate": "the simulators", "reset": "resets in the simulators", "reward": "the reward", "reference": "the reference policy"}
_PLACES |= {"update": "the update", "all-reduce": "summing gradients over trainer ranks", "switch": "off-loading"}
_PLACES |= dict.fromkeys(("publish", "load"), "publishing weights") | {"trajectories": "moving trajectories", "features": "moving features"}


@dataclass(frozen=True)
class Prediction:
    """seconds: of one iteration in the long run. critical: of these, on the chain of tasks that none can shorten but by being faster.

    utilisation: resource -> share of its capacity. spans: iteration -> what happened; those of the iteration that is shown begin at 0.
    """

    plan: Plan
    seconds: float
    steps: int
    critical: dict[str, float]
    utilisation: dict[str, float]
    spans: tuple[Span, ...]
    price: float | None
    """Of one iteration."""

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds

    @property
    def bottleneck(self) -> str:
        """Which part of the work an iteration waits for most, and how long."""
        shares = sorted(self.critical.items(), key=lambda each: -each[1])
        named = [
            f"{place} ({seconds:.3g} s, {100 * seconds / self.seconds:.0f} %)"
            for place, seconds in shares[:3]
            if seconds > 0.01 * self.seconds
        ]
        return f"an iteration of {self.seconds:.3g} s waits for {', then '.join(named)}"

    def timeline(self) -> Timeline:
        timeline = Timeline()
        for span in self.spans:
            timeline.add(*span)
        return timeline

    def document(self) -> dict[str, Any]:
        keys = ("seconds", "steps", "steps_per_s", "critical", "utilisation", "price", "bottleneck")
        return {"plan": self.plan.document()} | {key: getattr(self, key) for key in keys}

    def picture(self, width: int = 100, rows: int = 14) -> str:
        """Each track a line, each column a slice of the iteration: the letter of what took most of it; ``.`` for nothing."""
        tracks = list(dict.fromkeys(span.track for span in self.spans))
        first = sorted(tracks, key=_number)[:rows]
        shown = sorted((track for track in tracks if track in first), key="network".__eq__)
        label = max(map(len, shown), default=0)
        lines = [f"{track:>{label}} |{_row([span for span in self.spans if span.track == track], self.seconds, width)}|" for track in shown]
        if len(tracks) > rows:
            lines.append(f"{'':>{label}}  ... and {len(tracks) - rows} more like these")
        used = {span.name for span in self.spans if span.track in shown}
        lines.append(f"{'':>{label}}  0 s{f'{self.seconds:.3g} s':>{width - 3}}")
        legend: dict[str, list[str]] = defaultdict(list)
        for name in LETTERS:
            if name in used:
                legend[LETTERS[name]].append(name)
        return "\n".join([*lines, "  ".join(f"{letter} {'/'.join(names)}" for letter, names in legend.items())])


def _number(track: str) -> int:
    """Of the worker whose track it is: the first of each role come first."""
    found = re.search(r"(?:rollout|trainer|reference|reward) (\d+)", track)
    return int(found[1]) if found else 0


def _row(spans: Sequence[Span], seconds: float, width: int) -> str:
    slices: list[dict[str, float]] = [defaultdict(float) for _ in range(width)]
    each = seconds / width
    for span in spans:
        for number in range(max(0, int(span.start / each)), min(width - 1, int(span.end / each)) + 1):
            slices[number][LETTERS[span.name]] += max(0.0, min(span.end, (number + 1) * each) - max(span.start, number * each))
    return "".join(max(took, key=took.__getitem__) if sum(took.values()) > each / 3 else "." for took in slices)


def critical_path(tasks: Sequence[Task], played: Played, last: int, begin: float) -> dict[str, float]:
    """Seconds after ``begin`` on the chain of causes that led to task ``last``, by part of the work; the longest first."""
    found: dict[str, float] = defaultdict(float)
    number = last
    while number >= 0 and played.end[number] > begin:
        seconds = played.end[number] - max(begin, played.start[number])
        if seconds > 0:
            found[_PLACES[tasks[number].name]] += seconds
        number = played.cause[number]
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def spans_between(tasks: Iterable[Task], played: Played, begin: float, end: float) -> tuple[Span, ...]:
    """Of all that took time in this window, which becomes 0 and on."""
    found = []
    for number, task in enumerate(tasks):
        start, stop = max(begin, played.start[number]), min(end, played.end[number])
        if task.track and stop > start:
            found.append(Span(task.name, task.track, start - begin, stop - begin))
    order = list(dict.fromkeys(span.track for span in found))
    return tuple(sorted(found, key=lambda span: (order.index(span.track), span.start)))

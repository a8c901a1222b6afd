"""Predicted iteration time of a plan, with its bottleneck and a text timeline."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlinf_vla.features.planner.events import Task, TaskTimes
from rlinf_vla.features.planner.plan import Plan
from rlinf_vla.telemetry.timeline import Span, Timeline

_POLICY = "the policy in rollouts"
TASKS = {
    "act": ("a", _POLICY),
    "head": ("a", _POLICY),
    "encode": ("e", _POLICY),
    "value": ("v", _POLICY),
    "simulate": ("s", "the simulators"),
    "reset": ("r", "resets in the simulators"),
    "merge": ("m", _POLICY),
    "reward": ("w", "the reward"),
    "reference": ("f", "the reference policy"),
    "update": ("U", "the update"),
    "all-reduce": ("A", "summing gradients over trainer ranks"),
    "gather": ("g", "gathering sharded weights"),
    "trajectories": ("t", "moving trajectories"),
    "features": ("t", "moving features"),
    "publish": ("p", "publishing weights"),
    "load": ("p", "publishing weights"),
    "switch": ("x", "off-loading"),
}
"""Task -> its letter in a picture, and the part of the work that it belongs to."""


@dataclass(frozen=True)
class Prediction:
    """Prediction for one iteration of a plan.

    seconds: iteration time in the long run. critical: its seconds on the critical path, by part,
    longest first. utilisation: resource -> used share of its capacity. spans: timeline of an
    iteration from 0 on.
    """

    plan: Plan
    seconds: float
    steps: int
    critical: dict[str, float]
    utilisation: dict[str, float]
    spans: tuple[Span, ...]
    price: float | None
    """Price of one iteration; None if unknown."""

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds

    @property
    def bottleneck(self) -> str:
        """The parts of the work that an iteration waits for most, with their seconds."""
        longest = [
            (part, seconds)
            for part, seconds in self.critical.items()
            if seconds > 0.01 * self.seconds
        ][:3]
        named = [
            f"{part} ({seconds:.3g} s, {100 * seconds / self.seconds:.0f} %)"
            for part, seconds in longest
        ]
        return f"an iteration of {self.seconds:.3g} s waits for {', then '.join(named)}"

    def timeline(self) -> Timeline:
        timeline = Timeline()
        for span in self.spans:
            timeline.add(*span)
        return timeline

    def document(self) -> dict[str, Any]:
        keys = ("seconds", "steps", "steps_per_s", "critical", "utilisation", "price", "bottleneck")
        return {"plan": asdict(self.plan)} | {key: getattr(self, key) for key in keys}

    def picture(self, width: int = 100, rows: int = 14) -> str:
        """Text timeline: a line per track, a column per time slice, a letter for its main task.

        ``.`` marks slices that are mostly idle.
        """
        tracks = list(dict.fromkeys(span.track for span in self.spans))
        first = sorted(tracks, key=_number)[:rows]
        drawn = sorted((track for track in tracks if track in first), key="network".__eq__)
        label = max(map(len, drawn), default=0)
        lines = [
            f"{track:>{label}} |{_row([span for span in self.spans if span.track == track], self.seconds, width)}|"
            for track in drawn
        ]
        if len(tracks) > rows:
            lines.append(f"{'':>{label}}  ... and {len(tracks) - rows} more like these")
        used = {span.name for span in self.spans if span.track in drawn}
        lines.append(f"{'':>{label}}  0 s{f'{self.seconds:.3g} s':>{width - 3}}")
        legend: dict[str, list[str]] = defaultdict(list)
        for name, (letter, _) in TASKS.items():
            if name in used:
                legend[letter].append(name)
        return "\n".join(
            [*lines, "  ".join(f"{letter} {'/'.join(names)}" for letter, names in legend.items())]
        )


def _number(track: str) -> int:
    """Index of the track's worker, so that the first workers of each role sort first."""
    match = re.search(r"(?:rollout|trainer|reference|reward) (\d+)", track)
    return int(match[1]) if match else 0


def _row(spans: Sequence[Span], seconds: float, width: int) -> str:
    slices: list[dict[str, float]] = [defaultdict(float) for _ in range(width)]
    duration = seconds / width
    for span in spans:
        for number in range(
            max(0, int(span.start / duration)), min(width - 1, int(span.end / duration)) + 1
        ):
            slices[number][TASKS[span.name][0]] += max(
                0.0, min(span.end, (number + 1) * duration) - max(span.start, number * duration)
            )
    return "".join(
        max(took, key=took.__getitem__) if sum(took.values()) > duration / 3 else "."
        for took in slices
    )


def critical_path(
    tasks: Sequence[Task], played: TaskTimes, last: int, begin: float
) -> dict[str, float]:
    """Seconds after ``begin`` on the critical path to task ``last``, by part, longest first."""
    parts: dict[str, float] = defaultdict(float)
    number = last
    while number >= 0 and played.end[number] > begin:
        seconds = played.end[number] - max(begin, played.start[number])
        if seconds > 0:
            parts[TASKS[tasks[number].name][1]] += seconds
        number = played.cause[number]
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def spans_between(
    tasks: Iterable[Task], played: TaskTimes, begin: float, end: float
) -> tuple[Span, ...]:
    """Return the spans of tasks from ``begin`` to ``end``, shifted so that ``begin`` is 0."""
    spans = []
    for number, task in enumerate(tasks):
        start, stop = max(begin, played.start[number]), min(end, played.end[number])
        if task.track and stop > start:
            spans.append(Span(task.name, task.track, start - begin, stop - begin))
    order = list(dict.fromkeys(span.track for span in spans))
    return tuple(sorted(spans, key=lambda span: (order.index(span.track), span.start)))

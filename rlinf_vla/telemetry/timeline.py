"""Who did what when, as a trace for ui.perfetto.dev or chrome://tracing, and as utilisation numbers."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

KEPT_ITERATIONS = 2
"""The present one and the one before: a run of any length holds the same memory."""


class Span(NamedTuple):
    """``start`` and ``end`` in seconds of ``time.perf_counter``, which all processes of one Linux machine share."""

    name: str
    track: str
    start: float
    end: float


class Timeline:
    """Spans of the latest iterations. Safe to record into from several threads.

    A track is one row of the picture (a device, a worker, a group of environments). Spans of one track nest or follow each
    other; what overlaps freely belongs on tracks of its own.
    """

    def __init__(self) -> None:
        self._iterations: deque[tuple[int, list[Span]]] = deque([(0, [])], maxlen=KEPT_ITERATIONS)

    def begin_iteration(self, iteration: int) -> None:
        """What is recorded from now on belongs to ``iteration``; spans older than the iteration before it are dropped."""
        self._iterations.append((iteration, []))

    def add(self, name: str, track: str, start: float, end: float) -> None:
        """Record a span that was timed elsewhere."""
        self._iterations[-1][1].append(Span(name, track, start, end))

    @contextmanager
    def span(self, name: str, track: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.add(name, track, start, perf_counter())

    def spans(self) -> list[Span]:
        """Of the present iteration."""
        return list(self._iterations[-1][1])

    def busy(self, track: str) -> float:
        """Seconds of the present iteration in which ``track`` did anything; overlapping spans count once."""
        total, reached = 0.0, float("-inf")
        for start, end in sorted((each.start, each.end) for each in self._iterations[-1][1] if each.track == track):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return total

    def write(self, path: Path) -> None:
        """Write the kept iterations in the Chrome trace event format; the file is replaced in one go.

        Times are microseconds since the first span; ``args.iteration`` says where a span belongs.
        Format: "Trace Event Format", Google, complete events (``ph: X``) and metadata events (``ph: M``).
        """
        spans = [(iteration, span) for iteration, recorded in self._iterations for span in tuple(recorded)]
        zero = min((span.start for _, span in spans), default=0.0)
        tracks = {track: tid for tid, track in enumerate(dict.fromkeys(span.track for _, span in spans), start=1)}
        events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "rlinf-vla"}}]
        for track, tid in tracks.items():
            events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": track}})
            events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
        events += [
            {
                "ph": "X",
                "pid": 1,
                "tid": tracks[span.track],
                "name": span.name,
                "ts": round((span.start - zero) * 1e6, 3),
                "dur": round((span.end - span.start) * 1e6, 3),
                "args": {"iteration": iteration},
            }
            for iteration, span in spans
        ]
        unfinished = path.with_name(f".{path.name}.unfinished")
        unfinished.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
        unfinished.replace(path)

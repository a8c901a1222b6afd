"""Record spans of work as a trace (ui.perfetto.dev, chrome://tracing) and as utilisation."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from rlinf_vla.core.io import write_text

RECORDED, PREDICTED = "timeline.json", "predicted.json"
"""Files of a run with the recorded timeline, and with the one that its plan predicts."""
KEPT_ITERATIONS = 2
"""The current iteration and the one before; bounds the memory of long runs."""


class Span(NamedTuple):
    """Times are ``time.perf_counter`` seconds, shared by all processes of a Linux machine."""

    name: str
    track: str
    start: float
    end: float


def trainer_track(rank: int, ranks: int) -> str:
    """Return the track of a trainer rank, in recorded and in predicted timelines."""
    return "trainer" if ranks == 1 else f"trainer {rank}"


def busy_seconds(spans: Iterable[Span], track: str) -> float:
    """Return the seconds in which ``track`` was busy; overlapping spans count once."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted((span.start, span.end) for span in spans if span.track == track):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


class Timeline:
    """Spans of the latest iterations. Several threads may record at the same time.

    A track is one row of the trace (a device, a worker, a group of environments). Spans of one
    track nest or follow each other; spans that overlap freely belong on separate tracks.
    """

    def __init__(self) -> None:
        self._iterations: deque[tuple[int, list[Span]]] = deque([(0, [])], maxlen=KEPT_ITERATIONS)

    def begin_iteration(self, iteration: int) -> None:
        """Assign later spans to ``iteration``; drop all but this and the previous iteration."""
        self._iterations.append((iteration, []))

    def add(self, name: str, track: str, start: float, end: float) -> None:
        """Record a span timed by the caller."""
        self._iterations[-1][1].append(Span(name, track, start, end))

    @contextmanager
    def span(self, name: str, track: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.add(name, track, start, perf_counter())

    def spans(self) -> list[Span]:
        """Return the spans of the current iteration."""
        return list(self._iterations[-1][1])

    def busy(self, track: str) -> float:
        """Return the busy seconds of ``track`` in this iteration."""
        return busy_seconds(self._iterations[-1][1], track)

    def write(self, path: Path) -> None:
        """Write the kept iterations in Chrome trace event format, replacing the file atomically.

        Times are microseconds since the first span; ``args.iteration`` is the span's iteration.
        Format: Google's "Trace Event Format", complete (``ph: X``) and metadata (``ph: M``) events.
        """
        spans = [
            (iteration, span)
            for iteration, recorded in self._iterations
            for span in tuple(recorded)
        ]
        zero = min((span.start for _, span in spans), default=0.0)
        tracks = {
            track: tid
            for tid, track in enumerate(dict.fromkeys(span.track for _, span in spans), start=1)
        }
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "rlinf-vla"}}
        ]
        for track, tid in tracks.items():
            events.append(
                {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": track}}
            )
            events.append(
                {
                    "ph": "M",
                    "pid": 1,
                    "tid": tid,
                    "name": "thread_sort_index",
                    "args": {"sort_index": tid},
                }
            )
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
        write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

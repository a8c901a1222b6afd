from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.telemetry.timeline import KEPT_ITERATIONS, Timeline

intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 15)).map(
        lambda each: (each[0], each[0] + each[1])
    ),
    max_size=12,
)


@given(intervals, intervals)
def test_busy_is_the_union(policy: list[tuple[int, int]], trainer: list[tuple[int, int]]) -> None:
    timeline = Timeline()
    timeline.begin_iteration(1)
    for track, spans in (("policy", policy), ("trainer", trainer)):
        for start, end in spans:
            timeline.add("work", track, float(start), float(end))
    for track, spans in (("policy", policy), ("trainer", trainer)):
        seconds = np.zeros(100, bool)
        for start, end in spans:
            seconds[start:end] = True
        assert timeline.busy(track) == seconds.sum()
    assert timeline.busy("nobody") == 0


def test_spans_are_timed_and_survive_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of this clock is a second later than the one before; there are two for each span, and no more."""
    clock = itertools.count()
    monkeypatch.setattr("rlinf_vla.telemetry.timeline.perf_counter", lambda: float(next(clock)))
    timeline = Timeline()
    timeline.begin_iteration(1)
    with timeline.span("outer", "policy"):
        with timeline.span("inner", "policy"):
            pass
        with pytest.raises(KeyError), timeline.span("failed", "trainer"):
            raise KeyError
    assert timeline.spans() == [
        ("inner", "policy", 1.0, 2.0),
        ("failed", "trainer", 3.0, 4.0),
        ("outer", "policy", 0.0, 5.0),
    ]
    assert timeline.busy("policy") == 5.0 and timeline.busy("trainer") == 1.0


def test_the_trace_is_what_perfetto_reads(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.begin_iteration(7)
    timeline.add("act", "policy", 100.0, 100.25)
    timeline.add("step", 'simulator "0"', 100.25, 100.75)
    timeline.add("act", "policy", 100.75, 101.0)
    timeline.write(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert sorted(names.values()) == ["policy", 'simulator "0"']
    spans = [event for event in events if event["ph"] == "X"]
    assert [(each["name"], names[each["tid"]], each["ts"], each["dur"]) for each in spans] == [
        ("act", "policy", 0, 250_000),
        ("step", 'simulator "0"', 250_000, 500_000),
        ("act", "policy", 750_000, 250_000),
    ]
    assert {each["args"]["iteration"] for each in spans} == {7}
    assert {each["pid"] for each in events} == {1}


def test_only_the_latest_iterations_are_kept(tmp_path: Path) -> None:
    timeline = Timeline()
    for iteration in range(1, 6):
        timeline.begin_iteration(iteration)
        timeline.add("update", "trainer", iteration, iteration + 0.5)
    assert timeline.busy("trainer") == 0.5
    timeline.write(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    kept = [event["args"]["iteration"] for event in events if event["ph"] == "X"]
    assert kept == list(range(6 - KEPT_ITERATIONS, 6))


def test_nothing_recorded_is_an_empty_trace(tmp_path: Path) -> None:
    Timeline().write(tmp_path / "timeline.json")
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"][0]["ph"] == "M"

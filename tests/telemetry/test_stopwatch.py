from __future__ import annotations

import pytest
import torch

from rlinf_vla.telemetry import stopwatch

CPU = torch.device("cpu")


def test_kinds_take_turns_and_the_first_turns_are_for_warming_up() -> None:
    order = ""

    def note(name: str) -> None:
        nonlocal order
        order += name

    seconds = stopwatch.time_interleaved({"a": lambda: note("a"), "b": lambda: note("b")}, CPU, calls=2, warmup=1)
    assert order == "ababab" and {name: len(each) for name, each in seconds.items()} == {"a": 2, "b": 2}
    assert all(each >= 0 for times in seconds.values() for each in times)


def test_no_turn_begins_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: float(next(clock)))
    found = stopwatch.time_interleaved({"a": lambda: None}, CPU, calls=50, warmup=2, limit=10.0)["a"]
    assert 1 <= len(found) < 10 and set(found) == {1.0}, "a call takes one tick of this clock"

"""What a run of pytest found, on however many workers: CPU seconds, failures, and what may not be skipped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

BUDGET_S = 2.0
"""CPU seconds that a test of ``make test`` may take. What takes more is marked ``slow``, or made cheaper."""
DEAREST = 10


@dataclass
class Failure:
    text: str
    in_teardown: bool
    """Then another test of the module may have caused it, as what it left behind."""


@dataclass
class Found:
    cpu_s: dict[str, float] = field(default_factory=dict)
    """By test, with its fixtures, and with the child processes that have ended."""
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    """By test, the first one of each."""
    refused: list[str] = field(default_factory=list)
    """What no repetition would change: errors of collection, skips without an allowed reason."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Found:
        values: dict[str, Any] = json.loads(path.read_text())
        values["failures"] = {name: Failure(**each) for name, each in values["failures"].items()}
        return cls(**values)

    def __add__(self, other: Found) -> Found:
        return Found(
            self.cpu_s | other.cpu_s,
            self.seconds | other.seconds,
            self.failures | other.failures,
            self.refused + other.refused,
        )


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended and were waited for."""
    return sum(os.times()[:4])


class Costs:
    """A plug-in of each process that runs tests."""

    def __init__(self) -> None:
        self._began = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._began = cpu_s()
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when == "teardown":
            item.user_properties.append(("cpu_s", cpu_s() - self._began))


class Record:
    """A plug-in of the process that hears of all results. Writes them to ``path`` if there is one, and failures at once."""

    def __init__(self, config: pytest.Config, path: Path | None) -> None:
        self._config = config
        self._path = path
        self.found = Found()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.found.failures.setdefault(
                report.nodeid, Failure(report.longreprtext, report.when == "teardown")
            )
            if (terminal := self._config.pluginmanager.get_plugin("terminalreporter")) is not None:
                terminal.ensure_newline()
                terminal.write_line(f"FAILED {report.nodeid}")
        self.found.seconds[report.nodeid] = (
            self.found.seconds.get(report.nodeid, 0.0) + report.duration
        )
        if report.when == "teardown":
            self.found.cpu_s[report.nodeid] = dict(report.user_properties).get("cpu_s", 0.0)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        reason = f"{report.nodeid} cannot be collected: {report.longreprtext}"
        if report.failed and reason not in self.found.refused:  # each worker collects all files
            self.found.refused.append(reason)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if self._path is not None:
            self.found.write(self._path)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._path is None:  # else tests/run.py prints one list for all lanes
            for line in dearest(self.found):
                terminalreporter.write_line(line)


def dearest(found: Found) -> list[str]:
    """One line for each of the tests that took the most CPU time, if one of them is above the budget."""
    above = sorted(found.cpu_s.items(), key=lambda item: -item[1])
    if not above or above[0][1] <= BUDGET_S:
        return []
    count = sum(seconds > BUDGET_S for seconds in found.cpu_s.values())
    lines = [f"{count} tests took more than {BUDGET_S:.0f} CPU-seconds; the dearest:"]
    return lines + [f"  {seconds:6.1f}  {name}" for name, seconds in above[:DEAREST]]

"""Fails a pure test that starts a process, opens a connection or sleeps, and distributes the lanes over workers."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.lanes import PURE, file_of, lane, starts_several
from tests.sources import ROOT

SHORT = {"git", "nvidia-smi", "uname", "ldconfig", "gcc", "cc", "ld", "objdump", "lscpu"}
"""Programs that a pure test may start: they answer at once, and no result depends on when."""

REFUSED = {
    "subprocess.Popen",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.kill",
    "os.killpg",
    "socket.bind",
    "socket.connect",
}
"""Audit events of Python that a pure test may not raise."""


class Lanes:
    """A plug-in of pytest."""

    def __init__(self) -> None:
        self._pure = False
        """Whether a pure test runs now."""
        self._sleep = time.sleep
        sys.addaudithook(self._hear)
        time.sleep = self._slept

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """With ``--dist loadfile``: all files that start several processes are the work of one worker, one after the other,
        and the others go file by file to whoever is free."""
        if config.getoption("dist") != "loadfile":
            return None
        from xdist.scheduler.loadscope import LoadScopeScheduling

        class OneAtATime(LoadScopeScheduling):
            def _split_scope(self, nodeid: str) -> str:
                path = file_of(nodeid)
                return "several processes" if starts_several(ROOT / path) else path

        return OneAtATime(config, log)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._pure = item.path.is_relative_to(ROOT) and lane(item.path) == PURE
        try:
            return (yield)
        finally:
            self._pure = False

    def _judges(self) -> bool:
        """Threads that a library keeps after a test of the other lane are not the pure test's."""
        return self._pure and threading.current_thread() is threading.main_thread()

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in REFUSED or not self._judges():
            return
        if event == "subprocess.Popen":
            program = Path(
                os.fsdecode(
                    arguments[1][0] if isinstance(arguments[1], list | tuple) else arguments[1]
                )
            ).name
            if program not in SHORT:
                refuse(f"starts {program}")
        else:
            refuse(f"calls {event}")

    def _slept(self, seconds: float) -> None:
        waits_for_a_program = sys._getframe(1).f_globals["__name__"] == "subprocess"
        if seconds > 0 and not waits_for_a_program and self._judges():
            refuse("sleeps")
        self._sleep(seconds)


def refuse(does: str) -> NoReturn:
    pytest.fail(
        f"a test of the pure lane {does}: set pytestmark = pytest.mark.machine in its file (tests/lanes.py)",
        pytrace=True,
    )

"""Which lane a test file is in, and that a pure test can depend on nothing else that runs. This file is a pure one."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import lanes

HERE = Path(__file__)


def test_this_file_is_pure() -> None:
    assert lanes.lane(HERE) == lanes.PURE


@pytest.mark.parametrize(
    ("code", "lane", "several"),
    [
        ("import torch", lanes.PURE, False),
        ("from pathlib import Path\ndef test_it(tmp_path): ...", lanes.PURE, False),
        ("import subprocess", lanes.MACHINE, False),
        ("def late():\n    from multiprocessing import Process", lanes.MACHINE, True),
        ("import pytest\npytestmark = [pytest.mark.simulator]", lanes.MACHINE, True),
        ("import pytest\npytestmark = pytest.mark.machine", lanes.MACHINE, False),
        ("from rlinf_vla.core.child_process import x", lanes.MACHINE, False),
        ("def test_it(pytester): ...", lanes.MACHINE, False),
        ("from tests.training.processes import on_ranks", lanes.MACHINE, True),
        ("import signal", lanes.MACHINE, False),
        ("import threading", lanes.MACHINE, False),
        ("import time\ntime.sleep(1)", lanes.MACHINE, False),
        ("from rlinf_vla.features.realworld.clock import Clock\nClock()", lanes.MACHINE, False),
    ],
)
def test_a_lane_follows_from_the_source(
    code: str, lane: str, several: bool, tmp_path: Path
) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(code)
    assert lanes.lane(path) == lane
    assert lanes.starts_several(path) is several


def test_a_lane_follows_from_the_neighbours_that_a_file_imports(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text("import helper")
    (tmp_path / "helper.py").write_text("from other import run")
    (tmp_path / "other.py").write_text("import ray")
    assert lanes.lane(path) == lanes.MACHINE and lanes.starts_several(path)


def run_a_program() -> None:
    importlib.import_module("subprocess").run(["sleep", "1"])


def sleep() -> None:
    importlib.import_module("time").sleep(0.001)


def listen() -> None:
    with importlib.import_module("socket").socket() as opened:
        opened.bind(("127.0.0.1", 0))


def signal_itself() -> None:
    importlib.import_module("os").kill(os.getpid(), 0)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (run_a_program, "starts sleep"),
        (sleep, "sleeps"),
        (listen, r"calls socket\.bind"),
        (signal_itself, r"calls os\.kill"),
    ],
)
def test_a_pure_test_that_depends_on_the_machine_fails(act: Callable[[], None], words: str) -> None:
    with pytest.raises(
        pytest.fail.Exception, match=f"a test of the pure lane {words}: set pytestmark"
    ):
        act()


def test_a_pure_test_may_ask_for_the_commit() -> None:
    importlib.import_module("subprocess").run(
        ["git", "--version"], check=True, timeout=60, capture_output=True
    )

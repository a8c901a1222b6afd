"""Careless and hostile callers at the socket of the arm's process. The process is the real one; its arm obeys at once."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from franka_session import is_driven, wait_until
from obedient import CELL

from rlinf_vla.core.channel import Channel
from rlinf_vla.core.listener import ask
from rlinf_vla.core.robot import RobotError
from rlinf_vla.robots import stop
from rlinf_vla.robots.child_process import ENDING_SIGNALS
from rlinf_vla.robots.franka.client import FrankaRobot
from rlinf_vla.robots.runtime_folder import ORDERS, Latch

HERE = Path(__file__).parent
HANG_S = 120.0
"""Seconds that only bound a hang."""


@pytest.fixture
def robot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FrankaRobot]:
    python = tmp_path / "python"
    run = f'PYTHONPATH="{HERE}:$PYTHONPATH" exec {sys.executable} {HERE / "obedient_process.py"} "$@"'
    python.write_text(f"#!/bin/sh\nulimit -n 256\n{run}\n")
    python.chmod(0o700)
    monkeypatch.setenv("OBEDIENT_TRUTH", str(tmp_path / "truth"))
    for limit in ("ANSWER_S", "RECOVERY_S"):
        monkeypatch.setattr(stop, limit, HANG_S)
    made = FrankaRobot(CELL, tmp_path, lambda timeout: "made up", python=str(python))
    made.connect(HANG_S)
    yield made
    made.close()


def shown(robot: FrankaRobot, folder: Path) -> str | None:
    """The robot's fault. The process has answered before: one that stands still would be sent more
    heartbeats than it has room for."""
    ask(folder / ORDERS, {}, HANG_S)
    return robot.observe().fault


def test_half_open_connections_do_not_prevent_a_stop(robot: FrankaRobot, tmp_path: Path) -> None:
    with ExitStack() as stack:
        for _ in range(300):
            stack.callback(Channel.dial(tmp_path / ORDERS, HANG_S).close)
        assert stop.send_order([tmp_path], "stop", "Bob") == [f"made up (process {robot.pid}): stopped by Bob"]
        wait_until(lambda: shown(robot, tmp_path) == "stopped by Bob", HANG_S, "it is shown")


@pytest.mark.parametrize("signum", ENDING_SIGNALS)
def test_each_signal_that_ends_the_process_is_latched(robot: FrankaRobot, tmp_path: Path, signum: signal.Signals) -> None:
    os.kill(robot.pid, signum)
    wait_until(lambda: not is_driven(tmp_path), HANG_S, "the process ends")
    assert Latch(tmp_path).fault == f"policy: the arm's process got {signum.name}"


def test_an_acknowledgement_reports_what_is_left(robot: FrankaRobot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    robot.stop("NaN")
    wait_until(lambda: shown(robot, tmp_path), HANG_S, "it is latched")
    for name in ("Bob", "Bob", "Eve"):
        stop.send_order([tmp_path], "stop", name)
    ask(tmp_path / ORDERS, {"stop": "a light curtain"}, HANG_S)
    who = f"made up (process {robot.pid}): "
    left = ["stopped by Bob; stopped by Eve; stopped by a light curtain", "stopped by Eve; stopped by a light curtain"]
    for faults in [*left, "stopped by a light curtain"]:
        assert stop.send_order([tmp_path], "acknowledge", "Ada") == [f"{who}{faults}: still latched, acknowledge that, too"]
    assert stop.send_order([tmp_path], "acknowledge", "Ada") == [f"{who}no fault"]


def test_an_acknowledgement_that_clears_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "RECOVERY_S", 0.2)
    answer = {"host": "fr3", "pid": 7, "fault": "user stop: pressed at the arm"}
    monkeypatch.setattr(stop, "ask", lambda path, message, timeout: answer)
    with pytest.raises(RobotError, match=r"^fr3 \(process 7\): user stop: .*: still latched, fix its cause and acknowledge again$"):
        stop.send_order([tmp_path], "acknowledge", "Ada")


NESTED = b"[" * 60_000


@pytest.mark.parametrize("data", [NESTED, b"x", b"[]", b'{"stop": {}}', b'{"acknowledge": []}', b'{"goal": 1, "goodbye": true}'])
def test_no_message_ends_the_process(robot: FrankaRobot, tmp_path: Path, data: bytes) -> None:
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.connect(str(tmp_path / ORDERS))
    caller.send(data)
    time.sleep(0.1)
    assert ask(tmp_path / ORDERS, {"stop": "stopped by Bob"}, HANG_S) is not None
    wait_until(lambda: "Bob" in str(ask(tmp_path / ORDERS, {}, HANG_S)), HANG_S, "it is stopped")
    wait_until(lambda: shown(robot, tmp_path), HANG_S, "it is shown")
    caller.close()

"""Careless and hostile callers at the socket of the arm's process. The process is the real one; its arm obeys at once."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from franka_session import is_driven, wait_until
from obedient import CELL

from rlinf_vla.core.channel import Channel
from rlinf_vla.features.realworld.listener import ask
from rlinf_vla.features.realworld.robot import RobotError, ToolPose, ToolTarget
from rlinf_vla.robots import stop
from rlinf_vla.robots.child_process import ENDING_SIGNALS
from rlinf_vla.robots.franka.client import FrankaRobot
from rlinf_vla.robots.lock import Lock
from rlinf_vla.robots.runtime_folder import LOCK, ORDERS, STATE, Latch

HERE = Path(__file__).parent
PATIENT = dataclasses.replace(CELL, heartbeat_timeout_s=2.0)
HANG_S = 120.0
"""Seconds that only bound a hang."""


@pytest.fixture
def robot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FrankaRobot]:
    python = tmp_path / "python"
    run = (
        f'PYTHONPATH="{HERE}:$PYTHONPATH" exec {sys.executable} {HERE / "obedient_process.py"} "$@"'
    )
    python.write_text(f"#!/bin/sh\nulimit -n 256\n{run}\n")
    python.chmod(0o700)
    monkeypatch.setenv("OBEDIENT_TRUTH", str(tmp_path / "truth"))
    for limit in ("ANSWER_S", "RECOVERY_S"):
        monkeypatch.setattr(stop, limit, HANG_S)
    made = FrankaRobot(PATIENT, tmp_path, lambda timeout: "made up", python=str(python))
    made.connect(HANG_S)
    yield made
    made.close()


def shown(robot: FrankaRobot, folder: Path) -> str | None:
    """The robot's fault. The process has answered before: one that stands still would be sent more
    heartbeats than it has room for."""
    ask(folder / ORDERS, {}, HANG_S)
    return robot.observe().fault


def replace_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


LOSSES: dict[str, Callable[[Path], object]] = {
    **{name: lambda folder, name=name: (folder / name).unlink() for name in (ORDERS, LOCK, STATE)},  # type: ignore[misc]
    "a moved folder": lambda folder: folder.rename(folder.parent / "moved"),
    "a lock of somebody else": lambda folder: (
        (folder / LOCK).unlink(),
        (folder / LOCK).write_text(""),
    ),
    "a socket of another kind": lambda folder: (
        (folder / ORDERS).unlink(),
        (folder / ORDERS).mkdir(),
    ),
    "no folder": shutil.rmtree,
    "a file for a folder": replace_by_a_file,
}
BEYOND_RESTORING = ("a socket of another kind", "a file for a folder")


@pytest.mark.parametrize("lost", LOSSES)
def test_an_arm_whose_files_are_lost_while_it_moves_stops_and_stays_the_only_one(
    robot: FrankaRobot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setattr(Lock, "ENDING_S", 0.0)
    start = robot.observe().pose
    robot.command(
        ToolTarget(ToolPose(start.position - np.array([0.02, 0.0, 0.0]), start.quaternion)),
        time.monotonic() + HANG_S,
    )
    wait_until(lambda: robot.observe().commanded is not None, HANG_S, "it moves")
    LOSSES[lost](tmp_path)
    if not tmp_path.is_file():
        tmp_path.mkdir(exist_ok=True)
        with pytest.raises(RobotError, match="made up is driven by process"):
            Lock(tmp_path, "made up")
    wait_until(lambda: robot.observe().fault, HANG_S, "the loss is a fault")
    assert re.fullmatch(r"files: .* deleted or replaced.*", str(robot.observe().fault))
    assert "stopped by Bob" in stop.send_order([tmp_path], "stop", "Bob")[0]
    if lost not in BEYOND_RESTORING:
        wait_until(
            lambda: is_driven(tmp_path) and Latch(tmp_path).faults[1:] == ("stopped by Bob",),
            HANG_S,
            "all is there again",
        )
        assert ask(tmp_path / ORDERS, {}, HANG_S) is not None
        assert (tmp_path / LOCK).read_text() == f"{robot.pid} drives", "so that a kill is latched"
    else:
        assert str(robot.observe().fault).endswith(": make room for them there")


def test_half_open_connections_do_not_prevent_a_stop(robot: FrankaRobot, tmp_path: Path) -> None:
    with ExitStack() as stack:
        for _ in range(300):
            stack.callback(Channel.dial(tmp_path / ORDERS, HANG_S).close)
        assert stop.send_order([tmp_path], "stop", "Bob") == [
            f"made up (process {robot.pid}): stopped by Bob"
        ]
        wait_until(lambda: shown(robot, tmp_path) == "stopped by Bob", HANG_S, "it is shown")


@pytest.mark.parametrize("signum", ENDING_SIGNALS)
def test_each_signal_that_ends_the_process_is_latched(
    robot: FrankaRobot, tmp_path: Path, signum: signal.Signals
) -> None:
    os.kill(robot.pid, signum)
    wait_until(lambda: not is_driven(tmp_path), HANG_S, "the process ends")
    assert Latch(tmp_path).fault == f"policy: the arm's process got {signum.name}"


def test_an_acknowledgement_reports_what_is_left(
    robot: FrankaRobot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    robot.stop("NaN")
    wait_until(lambda: shown(robot, tmp_path), HANG_S, "it is latched")
    for name in ("Bob", "Bob", "Eve"):
        stop.send_order([tmp_path], "stop", name)
    ask(tmp_path / ORDERS, {"stop": "a light curtain"}, HANG_S)
    who = f"made up (process {robot.pid}): "
    left = [
        "stopped by Bob; stopped by Eve; stopped by a light curtain",
        "stopped by Eve; stopped by a light curtain",
    ]
    for faults in [*left, "stopped by a light curtain"]:
        assert stop.send_order([tmp_path], "acknowledge", "Ada") == [
            f"{who}{faults}: still latched, acknowledge that, too"
        ]
    assert stop.send_order([tmp_path], "acknowledge", "Ada") == [f"{who}no fault"]


def test_an_acknowledgement_that_clears_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "RECOVERY_S", 0.2)
    answer = {"host": "fr3", "pid": 7, "fault": "user stop: pressed at the arm"}
    monkeypatch.setattr(stop, "ask", lambda path, message, timeout: answer)
    with pytest.raises(
        RobotError,
        match=r"^fr3 \(process 7\): user stop: .*: still latched, fix its cause and acknowledge again$",
    ):
        stop.send_order([tmp_path], "acknowledge", "Ada")


NESTED = b"[" * 60_000


@pytest.mark.parametrize(
    "data",
    [NESTED, b"x", b"[]", b'{"stop": {}}', b'{"acknowledge": []}', b'{"goal": 1, "goodbye": true}'],
)
def test_no_message_ends_the_process(robot: FrankaRobot, tmp_path: Path, data: bytes) -> None:
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.connect(str(tmp_path / ORDERS))
    caller.send(data)
    time.sleep(0.1)
    assert ask(tmp_path / ORDERS, {"stop": "stopped by Bob"}, HANG_S) is not None
    wait_until(lambda: "Bob" in str(ask(tmp_path / ORDERS, {}, HANG_S)), HANG_S, "it is stopped")
    wait_until(lambda: shown(robot, tmp_path), HANG_S, "it is shown")
    caller.close()

"""Careless and hostile callers at the socket of the arm's process. The process is the real one; its arm obeys at once."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from franka_session import wait_until
from obedient import CELL

from rlinf_vla.core.channel import Channel
from rlinf_vla.core.listener import ask
from rlinf_vla.robots import stop
from rlinf_vla.robots.franka.client import FrankaRobot
from rlinf_vla.robots.runtime_folder import ORDERS

HERE = Path(__file__).parent


@pytest.fixture
def robot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FrankaRobot]:
    python = tmp_path / "python"
    run = f'PYTHONPATH="{HERE}:$PYTHONPATH" exec {sys.executable} {HERE / "obedient_process.py"} "$@"'
    python.write_text(f"#!/bin/sh\nulimit -n 256\n{run}\n")
    python.chmod(0o700)
    monkeypatch.setenv("OBEDIENT_TRUTH", str(tmp_path / "truth"))
    made = FrankaRobot(CELL, tmp_path, lambda timeout: "made up", python=str(python))
    made.connect(60)
    yield made
    made.close()


def test_half_open_connections_do_not_prevent_a_stop(robot: FrankaRobot, tmp_path: Path) -> None:
    half_open = [Channel.dial(tmp_path / ORDERS, 10.0) for _ in range(300)]
    assert stop.send_order([tmp_path], "stop", "Bob") == [f"made up (process {robot.pid}): stopped by Bob"]
    assert robot.observe().fault == "stopped by Bob"
    for each in half_open:
        each.close()


NESTED = b"[" * 60_000


@pytest.mark.parametrize("data", [NESTED, b"x", b"[]", b'{"stop": {}}', b'{"acknowledge": []}', b'{"goal": 1, "goodbye": true}'])
def test_no_message_ends_the_process(robot: FrankaRobot, tmp_path: Path, data: bytes) -> None:
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.connect(str(tmp_path / ORDERS))
    caller.send(data)
    time.sleep(0.1)
    assert ask(tmp_path / ORDERS, {"stop": "stopped by Bob"}, 5.0) is not None
    wait_until(lambda: "Bob" in str(ask(tmp_path / ORDERS, {}, 5.0)), 5, "it is stopped")
    assert robot.observe().fault is not None
    caller.close()

"""The arm's client in the policy's process if the arm's process does not start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlinf_vla.features.realworld.robot import RobotError
from rlinf_vla.robots import cell_file
from rlinf_vla.robots.cell import Cell
from rlinf_vla.robots.franka.client import FrankaRobot

pytestmark = pytest.mark.machine  # commands that start processes

CELL = cell_file.load(cell_file.CELLS / "franka_sim.yaml", Cell)


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ("/nope", "No such file or directory"),
        ("/tmp", "Permission denied"),
        ("/bin/false", "ended with exit code 1"),
    ],
)
def test_an_invalid_interpreter_is_one_line(tmp_path: Path, python: str, why: str) -> None:
    left = list[None]()
    robot = FrankaRobot(
        CELL, tmp_path, lambda timeout: "127.0.0.1", lambda: left.append(None), python=python
    )
    with pytest.raises(RobotError, match=why) as raised:
        robot.connect(120.0)
    assert "\n" not in str(raised.value) and left == [None], "processes started for it are ended"
    with pytest.raises(RobotError, match="not connected"):
        robot.observe()


def test_a_host_that_is_not_found_is_released(tmp_path: Path) -> None:
    def nowhere(timeout: float) -> str:
        raise RobotError("no simulated cell")

    left = list[None]()
    robot = FrankaRobot(CELL, tmp_path, nowhere, lambda: left.append(None))
    with pytest.raises(RobotError, match="no simulated cell"):
        robot.connect(120.0)
    assert left == [None]


def test_a_package_that_its_python_lacks_is_named_with_the_fix(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o700)
    robot = FrankaRobot(CELL, tmp_path, lambda timeout: "127.0.0.1", python=str(bare))
    with pytest.raises(
        RobotError,
        match=r"the arm's process needs 'numpy', which is not installed: pip install 'rlinf-vla\[franka\]'",
    ):
        robot.connect(120.0)

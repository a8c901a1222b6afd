"""``python driving.py FOLDER PYTHON``: the arm moves in a circle until this is killed; it acknowledges a latched fault."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import numpy as np
from obedient import CELL

from rlinf_vla.features.realworld.robot import ToolPose, ToolTarget
from rlinf_vla.robots.franka.client import FrankaRobot


def main(folder: Path, python: str) -> None:
    robot = FrankaRobot(CELL, folder, lambda timeout: "made up", python=python)
    robot.connect(60)
    if robot.observe().fault is not None:
        robot.acknowledge("tester")
    while robot.observe().fault is not None:
        time.sleep(0.01)
    robot.home(10)
    at = CELL.home
    for step in range(1000):
        position = at.position + 0.02 * np.array([math.sin(step / 3), math.cos(step / 3) - 1, 0.0])
        robot.command(ToolTarget(ToolPose(position, at.quaternion), None), time.monotonic() + 0.25)
        time.sleep(0.1)
        robot.observe()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

"""A replacement for ``robot.python``: the arm's process with an arm and a hand that follow at once. It needs no franky.

``python obedient_process.py BOOTSTRAP MODULE DESCRIPTOR``; ``$OBEDIENT_TRUTH``: file of the commanded poses and their times.
"""

from __future__ import annotations

import importlib.metadata
import os
import runpy
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
from obedient import CELL, ObedientArm, ObedientGripper, joints_of

from rlinf_vla.features.realworld.robot import ToolPose, Vector
from rlinf_vla.robots.franka.messages import Measured


class Arm(ObedientArm):
    def __init__(self, host: str, cell: Any) -> None:
        super().__init__()
        self._truth = Path(os.environ["OBEDIENT_TRUTH"]).open("a", buffering=1)  # noqa: SIM115  (for the life of the process)

    @property
    def measured(self) -> Measured:
        return Measured(time.monotonic(), self.joints, np.zeros(7), self.pose, self.wrench)

    def track(self, pose: ToolPose, velocity: Vector) -> None:
        super().track(pose, velocity)
        self.joints = joints_of(self)
        self._truth.write(" ".join(map(str, [time.monotonic(), *pose.position.tolist()])) + "\n")

    def home(self) -> None:
        self.pose = CELL.home
        self.joints = np.array(CELL.home_joints_rad)

    def recover(self, timeout: float) -> None: ...

    def close(self) -> None: ...


class Gripper(ObedientGripper):
    server_version = 3
    widest = 0.08
    lost = False

    def __init__(self, host: str, cell: Any) -> None: ...

    def fix(self) -> None: ...


if __name__ == "__main__":
    sys.modules.setdefault(
        "franky", types.ModuleType("franky")
    )  # for modules that only name its exceptions
    for name, kind in (("driver", ("FrankyArm", Arm)), ("gripper", ("FrankyGripper", Gripper))):
        module = types.ModuleType(f"rlinf_vla.robots.franka.{name}")
        setattr(module, *kind)
        sys.modules[module.__name__] = module
    importlib.metadata.version = lambda name: "none"
    sys.argv = sys.argv[2:]
    runpy.run_module(f"rlinf_vla.{sys.argv[0]}", run_name="__main__", alter_sys=True)

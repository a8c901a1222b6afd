"""Client of the process of a LeRobot robot, used in the policy's process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlinf_vla.features.realworld.robot import RobotState, Target

from .. import cell_file
from ..arm_client import ArmClient
from ..joint_cell import JointCell
from . import messages


class LeRobotRobot(ArmClient):
    """A robot that LeRobot drives, of any number of joints."""

    module = "lerobot.process"

    def __init__(
        self,
        cell: JointCell,
        relative: bool,
        folder: Path,
        robot: Callable[[float], dict[str, Any]],
        leave: Callable[[], None] = lambda: None,
        journal: str | None = None,
        python: str | None = None,
    ) -> None:
        """``robot``: returns type, module and options of LeRobot's robot within the given seconds,
        starting a simulated one if needed; ``leave`` undoes that."""
        super().__init__(cell.spec(relative), folder, leave, python)
        self.cell = cell
        self._robot = robot
        self._journal = journal

    def options(self, timeout_s: float) -> dict[str, Any]:
        robot = self._robot(timeout_s)
        return {
            "host": self._folder.name,
            "robot": robot,
            "cell": self.cell.name,
            "limits": cell_file.as_json(self.cell),
            "folder": str(self._folder),
            "journal": self._journal,
        }

    def pack(self, target: Target) -> list[float | None]:
        return messages.pack_target(target)

    def unpack(self, data: bytes) -> RobotState:
        return messages.unpack(data)

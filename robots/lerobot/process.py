"""Main module of the process of a LeRobot robot (``arm_process.py``); needs numpy and lerobot.

A goal's numbers are the positions of all joints.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from rlinf_vla.core.channel import Channel
from rlinf_vla.features.realworld.robot import JointTarget, RobotState

from .. import cell_file
from ..arm_process import ArmProcess, main
from ..joint_cell import JointCell
from ..runtime_folder import Journal, Latch
from ..servo import NETWORK
from . import messages
from .driver import LeRobotArm
from .servo import JointServo


class LeRobotProcess(ArmProcess):
    """One robot, which may have several arms."""

    def __init__(self, owner: Channel, options: dict[str, Any], cell: JointCell) -> None:
        self._joints = cell
        self.capacity = messages.capacity(len(cell.joints))
        super().__init__(owner, options, cell)

    def connected(self, latch: Latch, journal: Journal) -> JointServo:
        self._own = JointServo(self._joints, self.within(self._connect), latch, journal)
        return self._own

    def _connect(self) -> LeRobotArm:
        robot = self._options["robot"]
        return LeRobotArm(robot["type"], robot["module"], robot["options"], self._joints)

    def recover(self) -> LeRobotArm:
        """Connect again if the connection is lost; the old one has then been closed."""
        arm: LeRobotArm = self._own.arm
        if (self._own.fault or "").startswith(NETWORK):
            arm.close()
            return self.within(self._connect)
        arm.problem = None
        return arm

    def install(self, recovered: LeRobotArm) -> None:
        self._own.arm = recovered

    def close(self) -> None:
        self._own.arm.close()
        super().close()

    def found(self) -> dict[str, str]:
        return {"versions": f"lerobot {version('lerobot')}"}

    def pack(self, state: RobotState) -> bytes:
        return messages.pack(state)

    def unpack_target(self, numbers: list[float | None]) -> JointTarget:
        return messages.unpack_target(numbers)


if __name__ == "__main__":
    main(
        lambda owner, options: LeRobotProcess(
            owner, options, cell_file.of(options["limits"], options["cell"], JointCell)
        )
    )

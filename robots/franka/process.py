"""Main module of the Franka's process (``arm_process.py``). It needs only numpy and franky.

A goal's numbers are x, y, z, qw, qx, qy, qz and the gripper's width.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from rlinf_vla.core.channel import Channel
from rlinf_vla.features.realworld.robot import RobotState, ToolState, ToolTarget

from .. import cell_file
from ..arm_process import ArmProcess, main
from ..cell import Cell
from ..runtime_folder import Journal, Latch
from ..servo import NETWORK
from . import messages
from .driver import FrankyArm
from .errors import ConnectionLost
from .gripper import FrankyGripper
from .servo import Servo


class FrankaProcess(ArmProcess):
    """An arm and its hand, each with a connection of its own."""

    capacity = messages.CAPACITY

    def __init__(self, owner: Channel, options: dict[str, Any], cell: Cell) -> None:
        self._franka = cell
        super().__init__(owner, options, cell)

    def connected(self, latch: Latch, journal: Journal) -> Servo:
        self._arm = self.within(lambda: FrankyArm(self._host, self._franka))
        self._gripper = self.within(lambda: FrankyGripper(self._host, self._franka))
        self._own = Servo(self._franka, self._arm, self._gripper, latch, journal)
        return self._own

    def recover(self) -> tuple[FrankyArm, FrankyGripper]:
        """Recover arm and gripper, reconnecting if needed; the servo keeps using the old ones."""
        arm, gripper = self._arm, self._gripper
        try:
            if (self._servo.fault or "").startswith(NETWORK):
                raise ConnectionLost
            arm.recover(self._franka.connect_timeout_s)
        except ConnectionLost:
            arm.close()  # the arm takes one connection at a time
            arm = self._arm = self.within(lambda: FrankyArm(self._host, self._franka))
            arm.recover(self._franka.connect_timeout_s)
        if gripper.lost:
            gripper.close()
            gripper = self.within(lambda: FrankyGripper(self._host, self._franka))
        gripper.fix()
        return arm, gripper

    def install(self, recovered: tuple[FrankyArm, FrankyGripper]) -> None:
        self._arm, self._gripper = self._own.arm, self._own.gripper = recovered

    def found(self) -> dict[str, str]:
        versions = f"franky-control {version('franky-control')}, hand's server version {self._gripper.server_version}"
        return {"versions": versions, "widest": str(self._gripper.widest)}

    def pack(self, state: RobotState) -> bytes:
        assert isinstance(state, ToolState)
        return messages.pack(state)

    def unpack_target(self, numbers: list[float | None]) -> ToolTarget:
        return messages.unpack_target(numbers)


if __name__ == "__main__":
    main(
        lambda owner, options: FrankaProcess(
            owner, options, cell_file.of(options["limits"], options["cell"], Cell)
        )
    )

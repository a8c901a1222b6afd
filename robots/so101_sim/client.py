"""Start one or two simulated SO-101, or connect to those of a folder, and control them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..simulated.client import CellProcesses
from . import scene

PORT, ROBOT_ID = "arm.port", "so101_sim"
FAULTS = ("silent", "blocked")
"""silent: the buses are interrupted. blocked: something holds the (left) elbow where it is."""


class SimulatedSO101(CellProcesses):
    """The arm of one folder; faults are FAULTS."""

    cell_module, renderer_module = "so101_sim.cell", "so101_sim.renderer"

    def __init__(self, folder: Path, arms: Sequence[str] = (scene.ONE_ARM,)) -> None:
        """``arms``: prefixes of the arms' names, see ``scene.build``."""
        super().__init__(folder)
        self.arms = tuple(arms)
        self.settings = {"arms": list(arms)}

    def robot(self) -> dict[str, Any]:
        """Return type, module and options of LeRobot's robot."""
        common = {"id": ROBOT_ID, "calibration_dir": str(self.folder)}
        if self.arms == scene.TWO_ARMS:
            ports = {f"{arm}arm_port": str(self.folder / f"{arm}{PORT}") for arm in self.arms}
            return {"type": "bi_so100_follower", "module": None, "options": common | ports}
        return {
            "type": "so101_follower",
            "module": None,
            "options": common | {"port": str(self.folder / PORT)},
        }

    def place(self, cube: tuple[float, float, float]) -> None:
        """Place the cube at x, y (metres) and yaw (radians)."""
        self.ask({"place": cube})

    def truth(self) -> scene.SimulatorState:
        """Return the true state of the simulation, for scripted experts, rewards and tests."""
        return scene.SimulatorState.unpack(self.read_truth())

"""Start a simulated SO-101, or connect to the one that runs in a folder, and control it."""

from __future__ import annotations

from typing import Any

from ..simulated.client import CellProcesses
from . import scene

PORT, ROBOT_ID = "arm.port", "so101_sim"
FAULTS = ("silent", "blocked")
"""silent: the bus is interrupted. blocked: something holds the elbow where it is."""


class SimulatedSO101(CellProcesses):
    """The arm of one folder; faults are FAULTS."""

    cell_module, renderer_module = "so101_sim.cell", "so101_sim.renderer"

    def options(self) -> dict[str, Any]:
        """Return the options of LeRobot's ``so101_follower`` for this arm."""
        return {"port": str(self.folder / PORT), "id": ROBOT_ID, "calibration_dir": str(self.folder)}

    def place(self, cube: tuple[float, float, float]) -> None:
        """Place the cube at x, y (metres) and yaw (radians)."""
        self.ask({"place": cube})

    def truth(self) -> scene.SimulatorState:
        """Return the true state of the simulation, for scripted experts, rewards and tests."""
        return scene.SimulatorState.unpack(self.read_truth())

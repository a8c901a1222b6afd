"""The plug-ins ``franka`` and ``franka_sim``: from a recipe's ``robot`` node to an arm and its cameras. Cheap to import."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlinf_vla.robot import Camera, Finding, Scene

from .. import cell_file, folder, orders
from ..by_hand import ByHand
from ..cell import Cell
from ..simulated.client import SimulatedCell
from ..simulated.touch import Touch
from . import doctor
from .check import findings
from .client import FrankaRobot
from .config import FrankaConfig, FrankaSimConfig

SHIPPED = "cell://"


def read_cell(location: str) -> Cell:
    """Raises CellError."""
    if location.startswith(SHIPPED):
        return cell_file.load(cell_file.CELLS / f"{location[len(SHIPPED) :]}.yaml")
    return cell_file.load(Path(location).expanduser())


class Franka:
    """Implements ``RobotPlugin``."""

    Config, simulated = FrankaConfig, False

    def make(self, config: FrankaConfig) -> FrankaRobot:
        host = config.host
        return FrankaRobot(read_cell(config.cell), self.folder(config), lambda timeout: host, journal=config.journal, python=config.python)

    def cameras(self, config: FrankaConfig) -> list[Camera]:
        from ..cameras import device

        return [device(name, camera) for name, camera in config.cameras.items()]

    def scene(self, config: FrankaConfig) -> Scene:
        return ByHand(config.instruction)

    def check(self, config: FrankaConfig) -> Iterator[Finding]:
        return findings(self.make(config), self.cameras(config))

    def diagnose(self) -> Iterator[Finding]:
        return doctor.of_an_arm()

    def order(self, config: FrankaConfig | None, order: str, person: str) -> list[str]:
        return orders.give(folder.arms() if config is None else [self.folder(config)], order, person)

    def folder(self, config: FrankaConfig) -> Path:
        return folder.of_arm(config.host)


class FrankaSim:
    """Implements ``RobotPlugin``."""

    Config, simulated = FrankaSimConfig, True

    def make(self, config: FrankaSimConfig) -> FrankaRobot:
        where, size = self.folder(config), config.image_size
        simulated = SimulatedCell(where)

        def find_host(timeout: float) -> str:
            return simulated.start(timeout, config.cameras, size, size, config.camera_hz)

        return FrankaRobot(read_cell(config.cell), where, find_host, simulated.close, config.journal, config.python)

    def cameras(self, config: FrankaSimConfig) -> list[Camera]:
        from ..cameras import SimulatedCamera

        return [SimulatedCamera(name, self.folder(config), config.max_age_s, config.frozen_s) for name in config.cameras]

    def scene(self, config: FrankaSimConfig) -> Scene:
        return Touch(SimulatedCell(self.folder(config)), read_cell(config.cell).spec)

    def check(self, config: FrankaSimConfig) -> Iterator[Finding]:
        return findings(self.make(config), self.cameras(config))

    def diagnose(self) -> Iterator[Finding]:
        return doctor.of_a_simulated_one()

    def order(self, config: FrankaSimConfig | None, order: str, person: str) -> list[str]:
        return orders.give(folder.arms() if config is None else [self.folder(config)], order, person)

    def folder(self, config: FrankaSimConfig) -> Path:
        path = folder.of_arm("franka_sim") if config.folder is None else Path(config.folder).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        return path


franka, franka_sim = Franka(), FrankaSim()

"""The plug-ins ``franka`` and ``franka_sim``: from a recipe's ``robot`` node to an arm and its cameras. Cheap to import."""

from __future__ import annotations

from pathlib import Path

from rlinf_vla.robot import Camera, RobotError

from .. import cell_file, folder
from ..cell import Cell
from ..channel import ask
from ..simulated.client import SimulatedCell
from .client import FrankaRobot
from .config import FrankaConfig, FrankaSimConfig

SHIPPED = "cell://"
_ANSWER_S = 2.0


def read_cell(location: str) -> Cell:
    """Raises CellError."""
    if location.startswith(SHIPPED):
        return cell_file.load(cell_file.CELLS / f"{location[len(SHIPPED) :]}.yaml")
    return cell_file.load(Path(location).expanduser())


class Franka:
    """Implements ``RobotPlugin``."""

    Config = FrankaConfig

    def make(self, config: FrankaConfig) -> FrankaRobot:
        host = config.host
        return FrankaRobot(read_cell(config.cell), self.folder(config), lambda timeout: host, journal=config.journal, python=config.python)

    def cameras(self, config: FrankaConfig) -> list[Camera]:
        from ..cameras import device

        return [device(name, camera) for name, camera in config.cameras.items()]

    def folder(self, config: FrankaConfig) -> Path:
        return folder.of_arm(config.host)


class FrankaSim:
    """Implements ``RobotPlugin``."""

    Config = FrankaSimConfig

    def make(self, config: FrankaSimConfig) -> FrankaRobot:
        where, size = self.folder(config), config.image_size
        simulated = SimulatedCell(where)

        def find_host(timeout: float) -> str:
            return simulated.start(timeout, config.cameras, size, size, config.camera_hz)

        return FrankaRobot(read_cell(config.cell), where, find_host, simulated.close, config.journal, config.python)

    def cameras(self, config: FrankaSimConfig) -> list[Camera]:
        from ..cameras import SimulatedCamera

        return [SimulatedCamera(name, self.folder(config), config.max_age_s, config.frozen_s) for name in config.cameras]

    def folder(self, config: FrankaSimConfig) -> Path:
        path = folder.of_arm("franka_sim") if config.folder is None else Path(config.folder).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        return path


def order(where: Path, message: dict[str, str]) -> str | None:
    """``{"stop": WHY}`` or ``{"acknowledge": PERSON}`` to the process that drives the arm now. Returns its fault. Raises RobotError where none does."""
    answer = ask(where / folder.ORDERS, message, _ANSWER_S)
    if answer is None:
        raise RobotError(f"no process drives an arm in {where}")
    fault: str | None = answer["fault"]
    return fault


franka, franka_sim = Franka(), FrankaSim()

"""Plug-ins ``franka`` and ``franka_sim``: build arm, cameras and scene from a recipe's ``robot``.

Cheap to import: drivers are imported when used.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

from rlinf_vla.features.realworld.robot import Camera, Finding, Scene

from .. import cell_file, runtime_folder, stop
from ..cell import Cell
from ..real_cell import ManualScene, camera
from ..simulated.client import SimulatedCell
from ..simulated.touch import TASKS
from .check import findings, of_an_arm, package
from .client import FrankaRobot
from .config import FrankaConfig, FrankaSimConfig


def read_cell(location: str) -> Cell:
    return cell_file.read(location, Cell)


class Franka:
    """Real Franka; implements ``RobotPlugin``."""

    Config = FrankaConfig
    simulated = False

    def make(self, config: FrankaConfig) -> FrankaRobot:
        host = config.host
        return FrankaRobot(
            read_cell(config.cell),
            self.folder(config),
            lambda timeout: host,
            journal=config.journal,
            python=config.python,
        )

    def cameras(self, config: FrankaConfig) -> list[Camera]:
        from ..cameras import device

        mounts = read_cell(config.cell).cameras
        return [
            device(name, camera(name, options), mounts.get(name))
            for name, options in config.cameras.items()
        ]

    def scene(self, config: FrankaConfig) -> Scene:
        return ManualScene(config.instruction)

    def check(self, config: FrankaConfig) -> Iterator[Finding]:
        return findings(self.make(config), self.cameras(config))

    def diagnose(self) -> Iterator[Finding]:
        return of_an_arm()

    def order(self, config: FrankaConfig | None, order: str, operator: str) -> list[str]:
        return stop.send_order(None if config is None else [self.folder(config)], order, operator)

    def folder(self, config: FrankaConfig) -> Path:
        return runtime_folder.of_arm(runtime_folder.address(config.host))


class FrankaSim:
    """Simulated Franka; implements ``RobotPlugin``."""

    Config = FrankaSimConfig
    simulated = True

    def make(self, config: FrankaSimConfig) -> FrankaRobot:
        where = self.folder(config)
        size = config.image_size
        simulated = SimulatedCell(where)

        def find_host(timeout: float) -> str:
            return simulated.start(timeout, config.cameras, size, size, config.camera_hz)

        return FrankaRobot(
            read_cell(config.cell), where, find_host, simulated.close, config.journal, config.python
        )

    def cameras(self, config: FrankaSimConfig) -> list[Camera]:
        from ..cameras import SimulatedCamera

        folder = self.folder(config)
        mounts = read_cell(config.cell).cameras
        return [
            SimulatedCamera(name, folder, config.max_age_s, config.frozen_s, mounts.get(name))
            for name in config.cameras
        ]

    def scene(self, config: FrankaSimConfig) -> Scene:
        return TASKS[config.task](SimulatedCell(self.folder(config)), read_cell(config.cell).space)

    def check(self, config: FrankaSimConfig) -> Iterator[Finding]:
        return findings(self.make(config), self.cameras(config))

    def diagnose(self) -> Iterator[Finding]:
        yield package("franky-sim", "franky_sim", "franky-sim")

    def order(self, config: FrankaSimConfig | None, order: str, operator: str) -> list[str]:
        """For all arms: do nothing. ``Franka`` orders the simulated ones, too, and twice is wrong:
        a second acknowledgement would clear the next fault."""
        return [] if config is None else stop.send_order([self.folder(config)], order, operator)

    def folder(self, config: FrankaSimConfig) -> Path:
        """Return the cell's folder. That of the default cell names the machine, since it exists
        only there."""
        own = f"franka_sim-{socket.gethostname()}"
        path = (
            runtime_folder.of_arm(own)
            if config.folder is None
            else Path(config.folder).expanduser()
        )
        path.mkdir(parents=True, exist_ok=True)
        return path


franka, franka_sim = Franka(), FrankaSim()

"""Plug-ins ``lerobot``, ``so101_sim`` and ``bi_so101_sim``: robot, cameras and scene of a recipe.

Cheap to import: drivers are imported when used.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlinf_vla.features.realworld.robot import Camera, Finding, Scene

from .. import cell_file, runtime_folder, stop
from ..joint_cell import JointCell
from ..real_cell import ManualScene, camera
from ..so101_sim import scene
from ..so101_sim.client import SimulatedSO101
from ..so101_sim.reach import Reach
from .client import LeRobotRobot
from .config import RELATIVE, BiSO101SimConfig, LeRobotConfig, SO101SimConfig

INSTALL = "install lerobot in an environment of its own and name its interpreter with robot.python (docs/lerobot.md)"


class LeRobot:
    """A real robot; implements ``RobotPlugin``."""

    Config = LeRobotConfig
    simulated = False

    def make(self, config: LeRobotConfig) -> LeRobotRobot:
        robot = {"type": config.type, "module": config.module, "options": dict(config.options)}
        cell = cell_file.read(config.cell, JointCell)
        relative = config.actions == RELATIVE
        return LeRobotRobot(
            cell,
            relative,
            self.folder(config),
            lambda timeout: robot,
            journal=config.journal,
            python=config.python,
        )

    def cameras(self, config: LeRobotConfig) -> list[Camera]:
        from ..cameras import device

        return [
            device(name, camera(name, options), None) for name, options in config.cameras.items()
        ]

    def scene(self, config: LeRobotConfig) -> Scene:
        return ManualScene(config.instruction)

    def check(self, config: LeRobotConfig) -> Iterator[Finding]:
        from .check import findings

        return findings(self.make(config), self.cameras(config))

    def diagnose(self) -> Iterator[Finding]:
        installed = find_spec("lerobot") is not None
        yield Finding(
            "lerobot",
            installed,
            version("lerobot") if installed else "optional: not installed",
            INSTALL,
        )

    def order(self, config: LeRobotConfig | None, order: str, operator: str) -> list[str]:
        """For all arms: do nothing, as ``franka`` orders them all."""
        return [] if config is None else stop.send_order([self.folder(config)], order, operator)

    def folder(self, config: LeRobotConfig) -> Path:
        """Return the robot's folder, named by its type and its id or ports."""
        named = config.options.get("id") or "_".join(
            str(value) for key, value in sorted(config.options.items()) if "port" in key
        )
        return runtime_folder.of_arm(f"lerobot-{config.type}-{named}")


class SO101Sim:
    """One or two simulated SO-101; implements ``RobotPlugin``."""

    simulated = True

    def __init__(self, config: type[SO101SimConfig], arms: Sequence[str]) -> None:
        """``arms``: prefixes of the joints' names."""
        self.Config = config
        self._arms = arms

    def make(self, config: SO101SimConfig) -> LeRobotRobot:
        where = self.folder(config)
        size = config.image_size
        simulated = SimulatedSO101(where, self._arms)

        def robot(timeout: float) -> dict[str, Any]:
            simulated.start(timeout, config.cameras, size, size, config.camera_hz)
            return simulated.robot()

        cell = cell_file.read(config.cell, JointCell)
        return LeRobotRobot(
            cell,
            config.actions == RELATIVE,
            where,
            robot,
            simulated.close,
            config.journal,
            config.python,
        )

    def cameras(self, config: SO101SimConfig) -> list[Camera]:
        from ..cameras import SimulatedCamera

        folder = self.folder(config)
        return [
            SimulatedCamera(name, folder, config.max_age_s, config.frozen_s, None)
            for name in config.cameras
        ]

    def scene(self, config: SO101SimConfig) -> Scene:
        space = cell_file.read(config.cell, JointCell).space(config.actions == RELATIVE)
        return Reach(SimulatedSO101(self.folder(config), self._arms), space)

    def check(self, config: SO101SimConfig) -> Iterator[Finding]:
        from .check import findings

        return findings(self.make(config), self.cameras(config))

    def diagnose(self) -> Iterator[Finding]:
        installed = find_spec("mujoco") is not None
        yield Finding(
            "MuJoCo",
            installed,
            version("mujoco") if installed else "optional: not installed",
            "pip install mujoco",
        )

    def order(self, config: SO101SimConfig | None, order: str, operator: str) -> list[str]:
        """For all arms: do nothing, as ``franka`` orders them all."""
        return [] if config is None else stop.send_order([self.folder(config)], order, operator)

    def folder(self, config: SO101SimConfig) -> Path:
        """Return the cell's folder; the default one names the machine, as it exists only there."""
        own = f"{config.name}-{socket.gethostname()}"
        path = (
            runtime_folder.of_arm(own)
            if config.folder is None
            else Path(config.folder).expanduser()
        )
        path.mkdir(parents=True, exist_ok=True)
        return path


lerobot = LeRobot()
so101_sim = SO101Sim(SO101SimConfig, (scene.ONE_ARM,))
bi_so101_sim = SO101Sim(BiSO101SimConfig, scene.TWO_ARMS)

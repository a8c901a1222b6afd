"""A robot without hardware as a package of its own announces it: for sessions in processes of their own, in real time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlinf_vla.robot import Camera, Finding, Robot, RobotState, Scene
from rlinf_vla.rollout.clock import MonotonicClock
from rlinf_vla.rollout.synthetic_cell import SyntheticCamera, SyntheticRobot
from tests.rollout.toy_cell import ToyScene

ENTRY_POINTS = """[rlinf_vla.robots]
toy = tests.commands.toy_robot:plugin
"""


@dataclass
class ToyConfig:
    """fault: of a file; where it is, the arm stops with what it says, and the file is gone."""

    name: str = "toy"
    hz: float = 20.0
    fault: str = "fault"
    simulated: bool = True


class ToyArm(SyntheticRobot):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__(MonotonicClock(), config.hz)
        self._fault = Path(config.fault)

    def observe(self) -> RobotState:
        if self._fault.exists():
            fault = self._fault.read_text()
            self._fault.unlink()
            self.state = RobotState(**(vars(self.state) | {"fault": fault}))
        return super().observe()


class ToyPlugin:
    Config, simulated = ToyConfig, True

    def make(self, config: ToyConfig) -> Robot:
        return ToyArm(config)

    def cameras(self, config: ToyConfig) -> list[Camera]:
        return [SyntheticCamera(MonotonicClock(), "front", (16, 16))]

    def scene(self, config: ToyConfig) -> Scene:
        return ToyScene()

    def check(self, config: ToyConfig) -> Iterator[Finding]:
        yield Finding("toy", True, "there")

    def order(self, config: ToyConfig | None, order: str, person: str) -> list[str]:
        return []


plugin = ToyPlugin()


def announce(folder: Path) -> None:
    """Such a package in ``folder``, which is to be on PYTHONPATH."""
    package = folder / "toy-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 0\n")
    (package / "entry_points.txt").write_text(ENTRY_POINTS)

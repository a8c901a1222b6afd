"""A robot without hardware as an installed package: for sessions in separate processes, in real time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from rlinf_vla.benchmarks.synthetic_cell import REST, SyntheticCamera, SyntheticRobot
from rlinf_vla.cli import compose
from rlinf_vla.features.realworld.clock import Clock
from rlinf_vla.features.realworld.robot import (
    Camera,
    Finding,
    Intervention,
    Robot,
    RobotError,
    RobotState,
    Scene,
    ToolPose,
    ToolTarget,
)
from rlinf_vla.runtime import recipes, run_directory
from tests.features.realworld.toy_cell import ToyScene

ENTRY_POINTS = """[rlinf_vla.robots]
toy = tests.cli.toy_robot:plugin
"""
RECIPE = """# @package _global_
defaults:
  - _self_
  - override /env: robot
  - override /robot: toy
  - override /model: compact
  - override /algorithm: sac
name: toy_rlpd
iterations: 2
episodes: 2
env:
  episode_limit: 12
session:
  acknowledge: script
  learner_nice: 0
control:
  max_observation_age_s: 5.0
  max_misses: 1000
  warmup: 1
cluster:
  update_threads: 1
model:
  checkpoint: {folder}/model
  options:
    random_weights: true
    images: [front]
  lora:
    rank: 0
rollout:
  pipeline_depth: 1
  batch_size: 1
evaluation:
  modes: [greedy]
checkpoints:
  every: 1
algorithm:
  episodes: 2
  demonstrations: 2
  batch_size: 4
  critics: 2
  hidden: 8
"""

Arguments = Callable[..., list[str]]


@dataclass
class ToyConfig:
    """fault: a file; if it exists, the arm stops with its text as the fault, and deletes it. by_hand, expert: of its scene. pixels: of its
    camera's height; no policy wants pictures of that shape."""

    name: str = "toy"
    hz: float = 20.0
    fault: str = "fault"
    simulated: bool = True
    by_hand: bool = False
    expert: bool = True
    pixels: int = 24


REACH_M = 0.5


class ToyArm(SyntheticRobot):
    """Its tool stays within ``REACH_M`` of the rest position along each axis."""

    def __init__(self, config: ToyConfig, clock: Clock) -> None:
        super().__init__(clock, config.hz)
        self._file = Path(config.fault)
        self.connected = False
        self._changes: list[Intervention] = []

    def connect(self, timeout_s: float) -> None:
        self.connected = True

    def close(self) -> None:
        self.connected = False

    def observe(self) -> RobotState:
        if self._file.exists():
            fault = self._file.read_text()
            self._file.unlink()
            self.state = replace(self.state, fault=fault)
        return super().observe()

    def home(self, timeout_s: float, objection: Callable[[], str | None] = lambda: None) -> None:
        self._refuse_in_a_fault()
        super().home(timeout_s, objection)

    def _refuse_in_a_fault(self) -> None:
        if self.state.fault is not None:
            raise RobotError(self.state.fault)

    def command(self, target: ToolTarget, valid_until: float) -> None:
        if not self.connected:
            raise RobotError("the toy is not connected")
        self._refuse_in_a_fault()
        wanted = target.pose.position
        if not np.isfinite(wanted).all():
            raise RobotError("a target is not finite")
        position = np.clip(wanted, REST.position - REACH_M, REST.position + REACH_M)
        if not np.array_equal(position, wanted):
            self._changes.append(
                Intervention(self.state.time, "reach", float(np.abs(wanted).max()), REACH_M)
            )
        width = (
            self.state.gripper_width
            if target.gripper_width is None
            else min(max(target.gripper_width, 0.0), self.spec.space.gripper_width_m)
        )
        super().command(
            ToolTarget(ToolPose(position, target.pose.quaternion), target.gripper_width),
            valid_until,
        )
        self.state = replace(self.state, gripper_width=width)

    def interventions(self) -> list[Intervention]:
        found = self._changes
        self._changes = []
        return found


class ToyPlugin:
    """Implements ``RobotPlugin``."""

    Config = ToyConfig
    simulated = True

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()

    def make(self, config: ToyConfig) -> Robot:
        return ToyArm(config, self.clock)

    def cameras(self, config: ToyConfig) -> list[Camera]:
        return [SyntheticCamera(self.clock, "front", (config.pixels, 2 * config.pixels))]

    def scene(self, config: ToyConfig) -> Scene:
        scene = ToyScene()
        scene.by_hand = config.by_hand
        scene.has_expert = config.expert
        return scene

    def check(self, config: ToyConfig) -> Iterator[Finding]:
        yield Finding("toy", True, "there")

    def diagnose(self) -> Iterator[Finding]:
        yield Finding("toy", True, "needs nothing")

    def order(self, config: ToyConfig | None, order: str, operator: str) -> list[str]:
        raise RobotError(f"nothing to {order}: whoever connected to the toy drives it")


plugin = ToyPlugin()


def announce(folder: Path) -> None:
    """Writes such a package into ``folder``, which must be on PYTHONPATH."""
    package = folder / "toy-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 0\n")
    (package / "entry_points.txt").write_text(ENTRY_POINTS)


def toy_run(directory: Path, words: list[str]) -> Path:
    """A run directory with the recipe of such a command line."""
    _, _, folder, *overrides = words
    recipes.register()
    GlobalHydra.instance().clear()
    with initialize_config_module(compose.CONFIG_MODULE, version_base="1.3"):
        config = compose.compose(
            "train", overrides=[f"hydra.searchpath=[file://{folder}]", *overrides]
        )
    directory.mkdir()
    run_directory.save_recipe(directory / run_directory.RECIPE, config)
    return directory

"""A robot without hardware as a package of its own announces it: for sessions in processes of their own, in real time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from rlinf_vla.benchmarks.synthetic_cell import SyntheticCamera, SyntheticRobot
from rlinf_vla.cli import compose
from rlinf_vla.core.robot import Camera, Finding, Robot, RobotState, Scene
from rlinf_vla.realworld.clock import Clock
from rlinf_vla.runtime import recipes, run_directory
from tests.realworld.toy_cell import ToyScene

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
    """fault: of a file; where it is, the arm stops with what it says, and the file is gone. by_hand, expert: of its scene. pixels: of its
    camera's height; no policy wants pictures of that shape."""

    name: str = "toy"
    hz: float = 20.0
    fault: str = "fault"
    simulated: bool = True
    by_hand: bool = False
    expert: bool = True
    pixels: int = 24


class ToyArm(SyntheticRobot):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__(Clock(), config.hz)
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
        return [SyntheticCamera(Clock(), "front", (config.pixels, 2 * config.pixels))]

    def scene(self, config: ToyConfig) -> Scene:
        scene = ToyScene()
        scene.by_hand, scene.has_expert = config.by_hand, config.expert
        return scene

    def check(self, config: ToyConfig) -> Iterator[Finding]:
        yield Finding("toy", True, "there")

    def order(self, config: ToyConfig | None, order: str, operator: str) -> list[str]:
        return []


plugin = ToyPlugin()


def announce(folder: Path) -> None:
    """Such a package in ``folder``, which is to be on PYTHONPATH."""
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
        config = compose.compose("train", overrides=[f"hydra.searchpath=[file://{folder}]", *overrides])
    directory.mkdir()
    run_directory.save_recipe(directory, config)
    return directory

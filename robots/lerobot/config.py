"""Configuration of the ``robot`` node of a recipe for a LeRobot robot, real or simulated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Dict, List, Optional  # noqa: UP035  (OmegaConf reads these spellings on every Python version)

from rlinf_vla.config.ranges import OUTSIDE, Hertz, ImageSize, Name, OneOf, Seconds

RELATIVE = "relative"
Actions = Annotated[str, OneOf(RELATIVE, "absolute")]


@dataclass
class LeRobotConfig:
    """A robot that implements LeRobot's ``Robot`` interface.

    type: name under which LeRobot knows the robot, such as so101_follower or bi_so100_follower.
    module: Python module that registers it; null: LeRobot's own.
    options: keys of its LeRobot configuration; ``+robot.options.port=/dev/ttyACM0``. Cameras do not
    belong there.
    actions: absolute: joint positions in LeRobot's units, as in LeRobot's datasets. relative:
    changes of them, in [-1, 1].
    cell: cell file with the limits of each joint (docs/lerobot.md).
    cameras, instruction, journal: as for ``franka``.
    python: interpreter of an environment with lerobot for the robot's process; null: this one.
    """

    name: Name = "lerobot"
    type: Name = "so101_follower"
    module: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045
    options: Dict[str, Any] = field(default_factory=dict, metadata=OUTSIDE)  # noqa: UP006
    actions: Actions = "absolute"
    cell: str = field(default="???", metadata=OUTSIDE)
    cameras: Dict[str, Any] = field(default_factory=dict, metadata=OUTSIDE)  # noqa: UP006
    instruction: str = "touch the red cube"
    journal: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045
    python: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045


@dataclass
class SO101SimConfig:
    """Simulated SO-101 at a table with a cube: LeRobot's SO101Follower at simulated motors.

    actions, python: as for ``lerobot``.
    cell, journal: as for ``franka``.
    folder, image_size, camera_hz, max_age_s, frozen_s: as for ``franka_sim``.
    cameras: a subset of ``front`` and ``wrist``.
    """

    name: Name = "so101_sim"
    actions: Actions = RELATIVE
    cell: str = field(default="cell://so101_sim", metadata=OUTSIDE)
    folder: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045
    cameras: List[str] = field(default_factory=lambda: ["front"])  # noqa: UP006
    image_size: ImageSize = 64
    camera_hz: Hertz = 20.0
    max_age_s: Seconds = 0.4
    frozen_s: Seconds = 1.0
    journal: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045
    python: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045


@dataclass
class BiSO101SimConfig(SO101SimConfig):
    """Two simulated SO-101 at one table: LeRobot's bimanual robot at simulated motors.

    cameras: a subset of ``front``, ``left_wrist`` and ``right_wrist``. The rest is as for
    ``so101_sim``.
    """

    name: Name = "bi_so101_sim"
    cell: str = field(default="cell://bi_so101_sim", metadata=OUTSIDE)
    cameras: List[str] = field(default_factory=lambda: ["front", "left_wrist", "right_wrist"])  # noqa: UP006

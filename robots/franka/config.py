"""Configuration of the ``robot`` node of a recipe for a Franka, real or simulated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Dict, List, Optional  # noqa: UP035  (OmegaConf reads these spellings on every Python version)

from rlinf_vla.config.ranges import OUTSIDE, Hertz, ImageSize, Name, OneOf, Seconds

from ..simulated.touch import TASKS


@dataclass
class FrankaConfig:
    """Franka Research 3 with a Franka Hand.

    host: name or address of the arm's control.
    cell: cell file with the arm's limits (docs/robot_safety.md); ``cell://NAME`` is a shipped one.
    cameras: name -> keys of CameraConfig; ``+robot.cameras.front.driver=opencv``.
    instruction: given to the policy; the operator arranges the scene and reports success.
    journal: file to which interventions, faults and acknowledgements are appended; null: in the
    arm's runtime folder.
    python: interpreter of another environment with numpy and franky-control for the arm's process;
    null: this one.
    """

    name: Name = "franka"
    host: Name = field(default="???", metadata=OUTSIDE)
    cell: str = field(default="???", metadata=OUTSIDE)
    cameras: Dict[str, Any] = field(default_factory=dict, metadata=OUTSIDE)  # noqa: UP006  (of CameraConfig Hydra could not add one)
    instruction: str = "touch the red cube"
    journal: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045
    python: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045


@dataclass
class FrankaSimConfig:
    """Simulated Franka Research 3 (franky-sim on loopback) at a table with a cube and a target.

    cell, journal, python: as for ``franka``.
    task: ``TouchCube``; in ``TouchAround`` the target lies half-way, and the tool must not pass
    over it.
    folder: folder of the simulated cell; processes that give the same one share the cell. null: one
    per user.
    cameras: a subset of ``front`` and ``wrist``.
    image_size: width and height in pixels.
    camera_hz: frames per second.
    max_age_s: seconds after which an image is too old.
    frozen_s: seconds after which bit-identical images are an error.
    """

    name: Name = "franka_sim"
    cell: str = field(default="cell://franka_sim", metadata=OUTSIDE)
    task: Annotated[str, OneOf(*TASKS)] = "TouchCube"
    folder: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045
    cameras: List[str] = field(default_factory=lambda: ["front"])  # noqa: UP006
    image_size: ImageSize = 64
    camera_hz: Hertz = 20.0
    max_age_s: Seconds = 0.4
    frozen_s: Seconds = 1.0
    journal: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045
    python: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045

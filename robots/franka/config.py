"""The ``robot`` node of a recipe for a Franka, real or simulated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional  # noqa: UP035  (OmegaConf reads these spellings on every Python version)

from rlinf_vla.trust import OUTSIDE


@dataclass
class CameraConfig:
    """driver: opencv or realsense.
    device: of OpenCV an index or a path (/dev/v4l/by-id/... survives a reboot), of a RealSense its serial number; null takes the first.
    width, height: pixels that the camera is asked for. hz: pictures per second.
    max_age_s: an older picture is an error. frozen_s: a picture that has not changed by one bit for so long is one, too.
    """

    driver: str = "realsense"
    device: Optional[str] = None  # noqa: UP045
    width: int = 640
    height: int = 480
    hz: int = 30
    max_age_s: float = 0.2
    frozen_s: float = 1.0


@dataclass
class FrankaConfig:
    """A Franka Research 3 with a Franka Hand.

    host: name or address of the arm's control.
    cell: file with its limits (docs/robot_safety.md); ``cell://NAME`` is one that comes with the package.
    cameras: name -> keys of CameraConfig; ``+robot.cameras.front.driver=opencv``.
    instruction: what the policy is told; a person lays out the scene, and says whether it was done.
    journal: file to which interventions, faults and acknowledgements are appended; null: beside the arm's lock.
    python: interpreter of another environment, with numpy and franky-control, for the arm's process; null: this one.
    """

    name: str = "franka"
    host: str = field(default="???", metadata=OUTSIDE)
    cell: str = field(default="???", metadata=OUTSIDE)
    cameras: Dict[str, Any] = field(default_factory=dict, metadata=OUTSIDE)  # noqa: UP006  (of CameraConfig Hydra could not add one)
    instruction: str = "touch the red cube"
    journal: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045
    python: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045


@dataclass
class FrankaSimConfig:
    """The same through franky-sim on loopback: an FR3 at a table with a cube and a target.

    cell, journal, python: as of ``franka``.
    folder: which simulated cell; whoever names the same one shares it. null: one for each user.
    cameras: of ``front`` and ``wrist``. image_size: pixels, both ways. camera_hz: pictures per second.
    max_age_s, frozen_s: as of a real camera.
    """

    name: str = "franka_sim"
    cell: str = field(default="cell://franka_sim", metadata=OUTSIDE)
    folder: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045
    cameras: List[str] = field(default_factory=lambda: ["front"])  # noqa: UP006
    image_size: int = 64
    camera_hz: float = 20.0
    max_age_s: float = 0.4
    frozen_s: float = 1.0
    journal: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045
    python: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045

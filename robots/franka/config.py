"""The ``robot`` node of a recipe for a Franka, real or simulated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Dict, List, Optional  # noqa: UP035  (OmegaConf reads these spellings on every Python version)

from rlinf_vla.ranges import Hertz, ImageSize, Name, Range, Seconds
from rlinf_vla.trust import OUTSIDE


@dataclass
class CameraConfig:
    """driver: opencv or realsense.
    device: of OpenCV an index or a path (/dev/v4l/by-id/... survives a reboot), of a RealSense its serial number; null takes the first.
    width, height: pixels that the camera is asked for. hz: pictures per second.
    max_age_s: an older picture is an error. frozen_s: a picture that has not changed by one bit for so long is one, too.
    """

    driver: Name = "realsense"
    device: Optional[str] = None  # noqa: UP045
    width: Annotated[int, Range(16, 8192)] = 640
    height: Annotated[int, Range(16, 8192)] = 480
    hz: Annotated[int, Range(1, 1000)] = 30
    max_age_s: Seconds = 0.2
    frozen_s: Seconds = 1.0


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

    name: Name = "franka"
    host: Name = field(default="???", metadata=OUTSIDE)
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

    name: Name = "franka_sim"
    cell: str = field(default="cell://franka_sim", metadata=OUTSIDE)
    folder: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045
    cameras: List[str] = field(default_factory=lambda: ["front"])  # noqa: UP006
    image_size: ImageSize = 64
    camera_hz: Hertz = 20.0
    max_age_s: Seconds = 0.4
    frozen_s: Seconds = 1.0
    journal: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045
    python: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045

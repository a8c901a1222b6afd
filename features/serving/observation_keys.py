"""Names of what an observation holds in openpi's and LeRobot's configurations.

For the server, which reads them, and for ``model=remote``, which sends them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ObservationKeys:
    images: Mapping[str, str]
    """Camera -> key of its image."""
    state: Mapping[str, int | None]
    """Key -> how many of the state's numbers it holds, in order; None: all that are left."""
    prompt: str


LIBERO = ObservationKeys(
    {"base": "observation/image", "wrist": "observation/wrist_image"},
    {"observation/state": 8},
    "prompt",
)
DROID = ObservationKeys(
    {"base": "observation/exterior_image_1_left", "wrist": "observation/wrist_image_left"},
    {"observation/joint_position": 7, "observation/gripper_position": 1},
    "prompt",
)
LEROBOT_IMAGE = "observation.images.{}"
LEROBOT = ObservationKeys(
    {"base": LEROBOT_IMAGE.format("base")}, {"observation.state": None}, "task"
)

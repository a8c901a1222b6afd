"""Define the ``env`` node of a recipe that runs Newton."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, List, Optional  # noqa: UP035  (OmegaConf reads these spellings on every Python version)

from rlinf_vla.config.ranges import Count, EnvCount, ImageSize, Name, OneOf, Seconds, Size

from ..genesis.config import CONTROL_MODES, REWARDS


@dataclass
class NewtonConfig:
    """Newton, with MuJoCo as its solver.

    task: a built-in scene (``rlinf-vla list tasks``).
    tasks: scenes of an evaluation sweep, in order; empty: ``task`` alone.
    num_envs: total number of environments over all groups.
    episode_limit: control steps after which an episode is truncated; null: the limit of the scene.
    control_mode: ``ee_delta_pos`` is (dx, dy, dz, gripper), ``ee_delta_pose`` (dx, dy, dz, rx, ry,
        rz, gripper); 1 moves the tool's target by 0.05 m or 0.25 rad; gripper 1 opens and -1
        closes.
    image_size: height and width of each image in pixels.
    cameras: scene cameras whose images the policy gets; null: all; []: none, only videos are
        rendered.
    reward: reward of a control step. ``sparse``: 1 on success, else 0. ``progress``: change of task
        progress (reach, grasp, transport), so that an episode sums to the progress made.
    processes: total number of simulator processes, with equal shares; null: one per group.
    step_timeout_s: seconds that a command may take before its process counts as hung and is
        replaced.
    """

    name: Name = "newton"
    task: Name = "PickCube"
    tasks: List[Name] = field(default_factory=list)  # noqa: UP006
    num_envs: EnvCount = 8
    episode_limit: Optional[Count] = None  # noqa: UP045
    control_mode: Annotated[str, OneOf(*CONTROL_MODES)] = "ee_delta_pos"
    image_size: ImageSize = 64
    cameras: Optional[List[str]] = None  # noqa: UP006, UP045
    reward: Annotated[str, OneOf(*REWARDS)] = "sparse"
    processes: Optional[Size] = None  # noqa: UP045
    step_timeout_s: Seconds = 120.0

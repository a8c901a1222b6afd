"""Define the ``env`` node of a recipe that runs Isaac Lab."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Optional

from rlinf_vla.config.ranges import (
    OUTSIDE,
    Count,
    EnvCount,
    ImageSize,
    Label,
    Name,
    OneOf,
    Positive,
    Seconds,
)

CAMERAS = {"base": "table_cam", "wrist": "wrist_cam"}
"""Camera name -> observation term of Isaac Lab's visuomotor tasks."""


@dataclass
class IsaacLabConfig:
    """Manager-based tasks of Isaac Lab, on a GPU.

    task: gym id of a task with one robot.
    module: Python module whose import registers the task.
    instruction: what the policy is told; null: our sentence (``rlinf-vla list tasks``).
    num_envs: total number of environments over all groups; a group is one batch in one process.
    episode_limit: control steps after which an episode is truncated. Replaces the task's time-out.
    success: name of the termination term that is success; null: the task reports no success.
    translation_m, rotation_rad: motion of the tool that 1 means in an action; null: the scale of
        the task. Only for relative inverse kinematics (``IK-Rel``).
    state: terms of the observation group ``policy`` that make up the state; empty: the tool's pose
        and gripper as docs/conventions.md, for which the task needs the terms ``eef_pos``,
        ``eef_quat`` and ``gripper_pos``.
    cameras: ``base`` (``table_cam``), ``wrist`` (``wrist_cam``) or names of other image terms of
        that group; []: no images, for tasks without cameras.
    image_size: height and width of the images in pixels; null: the task's.
    reward: ``sparse``: 1 on success, else 0. ``dense``: the task's own.
    device: device of the simulation, such as ``cuda:0``.
    step_timeout_s: seconds after which a process without an answer is replaced.
    python: the Python environment with isaaclab for the simulators; null: this one.
    """

    name: Name = "isaaclab"
    task: Name = "Isaac-Stack-Cube-Franka-IK-Rel-Visuomotor-v0"
    module: Name = field(default="isaaclab_tasks", metadata=OUTSIDE)
    instruction: Optional[Label] = None  # noqa: UP045
    num_envs: EnvCount = 16
    episode_limit: Count = 600
    success: Optional[Name] = "success"  # noqa: UP045
    translation_m: Optional[Positive] = None  # noqa: UP045
    rotation_rad: Optional[Positive] = None  # noqa: UP045
    state: list[Name] = field(default_factory=list)
    cameras: list[Name] = field(default_factory=lambda: list(CAMERAS))
    image_size: Optional[ImageSize] = None  # noqa: UP045
    reward: Annotated[str, OneOf("sparse", "dense")] = "sparse"
    device: Name = "cuda:0"
    step_timeout_s: Seconds = 600.0
    python: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045

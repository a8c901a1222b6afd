"""Define the ``env`` node of a recipe that runs Genesis."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, List, Optional  # noqa: UP035  (OmegaConf reads these spellings on every Python version)

from rlinf_vla.config.ranges import OUTSIDE, Count, EnvCount, ImageSize, Name, OneOf, Seconds, Size

BACKENDS = ("auto", "cpu", "gpu")
CONTROL_MODES = ("ee_delta_pos", "ee_delta_pose")
REWARDS = ("sparse", "progress")
VISUALS = ("low_poly", "stock")


@dataclass
class SceneConfig:
    """Keys of the simulators that play Genesis' scenes.

    task: a built-in scene (``rlinf-vla list tasks``).
    tasks: scenes of an evaluation sweep, in order; empty: ``task`` alone.
    num_envs: total number of environments over all groups; those of one process step together.
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

    name: Name = "???"
    task: Name = "PickCube"
    tasks: List[Name] = field(default_factory=list)  # noqa: UP006
    num_envs: EnvCount = 16
    episode_limit: Optional[Count] = None  # noqa: UP045
    control_mode: Annotated[str, OneOf(*CONTROL_MODES)] = "ee_delta_pos"
    image_size: ImageSize = 64
    cameras: Optional[List[str]] = None  # noqa: UP006, UP045
    reward: Annotated[str, OneOf(*REWARDS)] = "sparse"
    processes: Optional[Size] = None  # noqa: UP045
    step_timeout_s: Seconds = 120.0


@dataclass
class GenesisConfig(SceneConfig):
    """Genesis.

    tasks: scenes of an evaluation sweep, in order; empty: ``task`` or ``scene`` alone.
    scene: path of a scene file (YAML, docs/genesis.md), used instead of ``task``.
    backend: ``cpu`` simulates in separate processes, bit-reproducibly; ``gpu`` steps each group as
        one batch on this process's GPU, in a process of its own; ``auto`` chooses ``gpu`` if
        PyTorch finds one and ``num_envs`` >= 64.
    robot_visuals: ``low_poly`` renders the robot's collision meshes, several times faster on a CPU
        and with the same physics; ``stock`` renders its visual meshes.
    processes: total number of simulator processes (cpu backend), with equal shares; null: one per
        group.
    cache_dir: folder of compiled kernels and prepared meshes; null: ``~/.cache/rlinf-vla/genesis``.
    """

    name: Name = "genesis"
    scene: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045
    backend: Annotated[str, OneOf(*BACKENDS)] = "auto"
    robot_visuals: Annotated[str, OneOf(*VISUALS)] = "low_poly"
    cache_dir: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045

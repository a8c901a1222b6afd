"""The ``env`` node of a recipe that runs Genesis."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, List, Optional  # noqa: UP035  (OmegaConf reads these spellings on every Python version)

from rlinf_vla.ranges import Count, EnvCount, ImageSize, Name, OneOf, Seconds, Size
from rlinf_vla.trust import OUTSIDE

BACKENDS = ("auto", "cpu", "gpu")
CONTROL_MODES = ("ee_delta_pos", "ee_delta_pose")
REWARDS = ("sparse", "progress")
VISUALS = ("low_poly", "stock")


@dataclass
class GenesisConfig:
    """Genesis.

    task: a built-in scene, one that ``plugin.tasks()`` lists.
    tasks: what an evaluation sweep plays, one after the other; empty: ``task`` or ``scene`` alone.
    scene: a scene file of your own (YAML, docs/genesis.md), instead of ``task``.
    num_envs: environments in all, over all groups; those of a group and process are stepped together.
    episode_limit: control steps after which an episode is truncated; null takes the scene's own.
    backend: ``cpu`` simulates in processes of its own, bit-reproducibly; ``gpu`` steps all environments as one batch on the GPU of this
        process; ``auto`` picks ``gpu`` where PyTorch sees one and ``num_envs`` is at least 64.
    control_mode: ``ee_delta_pos`` is (dx, dy, dz, gripper), ``ee_delta_pose`` (dx, dy, dz, rx, ry, rz, gripper); 1 is 0.05 m or
        0.25 rad of the tool's target, gripper 1 opens and -1 closes.
    image_size: pixels, both height and width of each image.
    cameras: of the scene, those whose images a policy gets; null takes all, [] none: nothing is drawn but films.
    robot_visuals: ``low_poly`` draws the robot by its collision meshes, several times faster on a CPU; the physics is the same.
    reward: per control step; ``sparse`` is 1 on success, else 0; ``progress`` is what a step changes of how much is done (the way to the
        object, grasping it, the way to its place), so that an episode's sum is the progress it made.
    processes: simulator processes in all (cpu backend), each with an equal share of its group's environments; null takes one per group.
    cache_dir: where Genesis keeps compiled kernels and prepared meshes; null takes ``~/.cache/rlinf-vla/genesis``.
    step_timeout_s: seconds that a process may take for one command before it counts as hung and is replaced.
    """

    name: Name = "genesis"
    task: Name = "PickCube"
    tasks: List[Name] = field(default_factory=list)  # noqa: UP006
    scene: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045
    num_envs: EnvCount = 16
    episode_limit: Optional[Count] = None  # noqa: UP045
    backend: Annotated[str, OneOf(*BACKENDS)] = "auto"
    control_mode: Annotated[str, OneOf(*CONTROL_MODES)] = "ee_delta_pos"
    image_size: ImageSize = 64
    cameras: Optional[List[str]] = None  # noqa: UP006, UP045
    robot_visuals: Annotated[str, OneOf(*VISUALS)] = "low_poly"
    reward: Annotated[str, OneOf(*REWARDS)] = "sparse"
    processes: Optional[Size] = None  # noqa: UP045
    cache_dir: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045
    step_timeout_s: Seconds = 120.0

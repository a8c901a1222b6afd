"""The ``env`` node of a recipe that runs ManiSkill."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Optional

from rlinf_vla.ranges import Count, EnvCount, ImageSize, Name, OneOf, Seconds, Size
from rlinf_vla.trust import OUTSIDE

BACKENDS = ("auto", "cpu", "gpu")
CAMERAS = ("close", "stock")
VISUALS = ("low_poly", "stock")
REWARDS = ("sparse", "normalized_dense", "dense", "progress")


@dataclass
class ManiSkillConfig:
    """ManiSkill 3.

    task: a name that ``plugin.tasks()`` lists.
    tasks: what an evaluation sweep plays, one after the other; empty: ``task`` alone. With several, control_mode, camera and the like
        must be right for each.
    num_envs: environments in all, over all groups.
    episode_limit: control steps after which an episode is truncated; null takes the task's own.
    backend: ``cpu`` simulates and renders in processes of its own, bit-reproducibly; ``gpu`` steps all environments as one batch on the
        GPU of this process; ``auto`` picks ``gpu`` where PyTorch sees one and ``num_envs`` is at least 64.
    control_mode: what an action means. Of the normalised ones, ``pd_ee_delta_pos`` is (dx, dy, dz, gripper), ``pd_ee_delta_pose`` is
        (dx, dy, dz, rx, ry, rz, gripper); 1 is 0.1 m or +0.1 rad about that axis of the robot's base, gripper 1 opens and -1 closes.
    image_size: pixels, both height and width of the image ``base``.
    camera: ``close`` looks at the middle of the table from 0.5 m away, so that a 4 cm cube covers 4 or 5 of 64 pixels; ``stock`` is
        the task's own camera, and what a task gets whose things lie elsewhere.
    robot_visuals: ``low_poly`` draws a robot by its collision meshes and a smaller floor, many times faster on a CPU; the physics is
        the same bit for bit. ``stock`` draws the full meshes.
    reward: per control step; ``sparse`` is 1 on success, -1 on failure, else 0. ``dense`` and ``normalized_dense`` are ManiSkill's, more
        than 0 at every step, so that it pays to dawdle; ``progress`` is what a step changes of ``normalized_dense``, so that an
        episode's sum is the progress it made (potential-based shaping, Ng et al. 1999).
    processes: simulator processes in all (cpu backend); null takes one per CPU core, at least one per group.
    step_timeout_s: seconds that a process may take for one command before it counts as hung and is replaced.
    asset_dir: where ManiSkill's downloaded assets lie (MS_ASSET_DIR); null takes the environment variable or ``~/.maniskill``.
    """

    name: Name = "maniskill"
    task: Name = "PushCube"
    tasks: list[Name] = field(default_factory=list)
    num_envs: EnvCount = 16
    episode_limit: Optional[Count] = None  # noqa: UP045  (OmegaConf reads this spelling on every Python version)
    backend: Annotated[str, OneOf(*BACKENDS)] = "auto"
    control_mode: Name = "pd_ee_delta_pos"
    image_size: ImageSize = 64
    camera: Annotated[str, OneOf(*CAMERAS)] = "close"
    robot_visuals: Annotated[str, OneOf(*VISUALS)] = "low_poly"
    reward: Annotated[str, OneOf(*REWARDS)] = "sparse"
    processes: Optional[Size] = None  # noqa: UP045
    step_timeout_s: Seconds = 120.0
    asset_dir: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045

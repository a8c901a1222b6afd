"""Define the ``env`` node of a recipe that runs ManiSkill."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Optional

from rlinf_vla.config.ranges import OUTSIDE, Count, EnvCount, ImageSize, Name, OneOf, Seconds, Size

BACKENDS = ("auto", "cpu", "gpu")
CAMERAS = ("close", "stock")
STATES = ("tool", "qpos")
VERSIONS = ("rlinf", "rl4vla")
VISUALS = ("low_poly", "stock")
REWARDS = ("sparse", "normalized_dense", "dense", "progress")


@dataclass
class ManiSkillConfig:
    """ManiSkill 3.

    task: task name (``rlinf-vla list tasks``).
    tasks: tasks of an evaluation sweep, in order; empty: ``task`` alone. The other keys apply to
        each.
    num_envs: total number of environments over all groups.
    episode_limit: control steps after which an episode is truncated; null: the limit of the task.
    backend: ``cpu`` simulates and renders in separate processes, bit-reproducibly; ``gpu`` steps
        each group as one batch on this process's GPU, in a process of its own; ``auto`` chooses
        ``gpu`` if PyTorch and Vulkan see one and ``num_envs`` >= 64.
    control_mode: ManiSkill control mode. ``pd_ee_delta_pos`` is (dx, dy, dz, gripper),
        ``pd_ee_delta_pose`` (dx, dy, dz, rx, ry, rz, gripper); 1 is 0.1 m or +0.1 rad about that
        axis of the robot's base; gripper 1 opens and -1 closes.
    image_size: height and width of the image ``base`` in pixels; null: the published 640 x 480 of
        tasks before a photograph (bridge tasks and PutOnPlateInScene25).
    depth: also show ``base_depth``, the distances that the camera of ``base`` measures.
    state: the robot's state. ``tool``: pose of the tool and the last gripper joint, 8 numbers.
        ``qpos``: all joints (rad, m), as RLinf's policies for ManiSkill expect.
    version: of PutOnPlateInScene25: ``rlinf`` starts with objects in the air, ``rl4vla`` after they
        came to rest; the textures of its Vision tasks differ, too.
    camera: ``close`` views the middle of the table from about 0.7 m, so that a 4 cm cube covers 4
        or 5 of 64 pixels; ``stock`` is the task's own camera, also used by tasks whose objects
        lie elsewhere.
    robot_visuals: ``low_poly`` renders collision meshes and a smaller floor, many times faster on a
        CPU and with bit-identical physics; ``stock`` renders the full meshes.
    reward: reward of a control step. ``sparse``: 1 on success, -1 on failure, else 0. ``dense`` and
        ``normalized_dense``: ManiSkill's, positive at every step, which rewards delay.
        ``progress``: change of ``normalized_dense``, so that an episode sums to the progress made
        (potential-based shaping, Ng et al. 1999). In PutOnPlateInScene25 it is the published
        reward: 0.1 for a grasp, 0.1 for a grasp of five steps, 1 on success after a grasp.
    success_ends: whether a success ends an episode; false: it goes on to its limit, as in RL4VLA.
    processes: total number of simulator processes (cpu backend), which rollout workers divide;
        null: one per CPU core, at least one per group.
    step_timeout_s: seconds that a command may take before its process counts as hung and is
        replaced.
    asset_dir: folder of ManiSkill's assets; null: ``MS_ASSET_DIR`` or ``~/.maniskill``.
    """

    name: Name = "maniskill"
    task: Name = "PushCube"
    tasks: list[Name] = field(default_factory=list)
    num_envs: EnvCount = 16
    episode_limit: Optional[Count] = None  # noqa: UP045  (OmegaConf reads this spelling on every Python version)
    backend: Annotated[str, OneOf(*BACKENDS)] = "auto"
    control_mode: Name = "pd_ee_delta_pos"
    image_size: Optional[ImageSize] = 64  # noqa: UP045
    depth: bool = False
    state: Annotated[str, OneOf(*STATES)] = "tool"
    version: Annotated[str, OneOf(*VERSIONS)] = "rlinf"
    camera: Annotated[str, OneOf(*CAMERAS)] = "close"
    robot_visuals: Annotated[str, OneOf(*VISUALS)] = "low_poly"
    reward: Annotated[str, OneOf(*REWARDS)] = "sparse"
    success_ends: bool = True
    processes: Optional[Size] = None  # noqa: UP045
    step_timeout_s: Seconds = 120.0
    asset_dir: Optional[str] = field(default=None, metadata=OUTSIDE)  # noqa: UP045


def meaning(state: str, tool: list[float] | None) -> dict[str, Any]:
    """Return ``tool`` and ``native`` of the ``SimulatorSpec`` for a choice of ``env.state``.

    ``tool``: m and rad that 1 means in an action; None if actions do not move a tool.
    """
    if tool is None or state == "tool":
        return {"tool": tool}
    return {
        "native": {"tool": tool, "gripper": "open_positive", "state": state, "images": "upright"}
    }

"""The tasks: what they are called here and in ManiSkill, what the robot is told, and what they need."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

BRIDGE_MARKERS = (
    "data/tasks/bridge_v2_real2sim_dataset/custom/info_bridge_custom_v0.json",
    "data/robots/widowx",
)
"""Files of the bridge tasks, relative to the asset directory. ManiSkill itself looks at directories only, and takes the empty one that a
failed download leaves for the data."""

PANDA_MODES = (
    "pd_ee_delta_pos",
    "pd_ee_delta_pose",
    "pd_ee_target_delta_pos",
    "pd_ee_target_delta_pose",
    "pd_ee_pose",
    "pd_joint_delta_pos",
    "pd_joint_target_delta_pos",
    "pd_joint_pos",
    "pd_joint_vel",
    "pd_joint_pos_vel",
    "pd_joint_delta_pos_vel",
)
BRIDGE_MODES = ("arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos",)
SO100_MODES = ("pd_joint_delta_pos", "pd_joint_pos", "pd_joint_target_delta_pos")
STICK_MODES = (
    "pd_ee_delta_pos",
    "pd_ee_delta_pose",
    "pd_ee_target_delta_pos",
    "pd_ee_target_delta_pose",
    "pd_joint_delta_pos",
    "pd_joint_target_delta_pos",
    "pd_joint_pos",
    "pd_joint_vel",
    "pd_joint_pos_vel",
    "pd_joint_delta_pos_vel",
)


Point = tuple[float, float, float]


@dataclass(frozen=True)
class TaskEntry:
    gym_id: str
    instruction: str
    """Tasks that draw an instruction per episode say it themselves; this is then an example."""
    limit: int
    """Control steps of an episode."""
    robot: str | None = "panda"
    """None keeps the task's own."""
    control_modes: tuple[str, ...] = PANDA_MODES
    rewards: tuple[str, ...] = ("sparse", "normalized_dense", "dense")
    camera: str = "base_camera"
    close_view: tuple[Point, Point, float] = ((0.55, 0.0, 0.55), (0.05, 0.0, 0.03), 1.0)
    """The camera ``close``: where it stands, what it looks at (metres, table frame), and its field of view (radians)."""
    has_expert: bool = False
    bridge: bool = False
    note: str = ""


TASKS: dict[str, TaskEntry] = {
    "PushCube": TaskEntry("PushCube-v1", "push the blue cube to the red and white target", 50, has_expert=True),
    "PickCube": TaskEntry(
        "PickCube-v1",
        "pick up the red cube and hold it at the goal",
        50,
        has_expert=True,
        note="the goal is not in the images: a policy that sees images and text alone cannot solve it",
    ),
    "StackCube": TaskEntry("StackCube-v1", "stack the red cube on the green cube", 50, has_expert=True),
    "PutOnPlate": TaskEntry(
        "PutOnPlate-v1",
        "put the red cube on the plate",
        50,
        has_expert=True,
        rewards=("sparse",),
        close_view=((0.5, 0.0, 0.5), (0.0, 0.0, 0.05), 0.8),
        note="the cube is red, green or blue, drawn per episode",
    ),
}

EXPERT_MODES = ("pd_ee_delta_pos", "pd_ee_delta_pose")
"""Control modes that the experts speak."""


def asset_dir(configured: str | None) -> Path:
    return Path(configured or os.environ.get("MS_ASSET_DIR") or Path.home() / ".maniskill").expanduser()


def missing_assets(entry: TaskEntry, configured_dir: str | None) -> list[Path]:
    """Files that the task needs and that are not there."""
    if not entry.bridge:
        return []
    return [path for path in (asset_dir(configured_dir) / marker for marker in BRIDGE_MARKERS) if not path.exists()]

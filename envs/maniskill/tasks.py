"""Define the tasks: names here and in ManiSkill, instructions and requirements."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from . import scene25_assets
from .config import REWARDS
from .scene25_episodes import OBJECT_SETS, PREFIX, TRAIN
from .scene25_episodes import TASKS as SCENE25_TASKS

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
"""Control modes of a Panda; with a stick, actions have no gripper component."""
SO100_MODES = ("pd_joint_delta_pos", "pd_joint_target_delta_pos", "pd_joint_pos")
WIDOWX_MODES = ("arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos",)
TOOL_MODES: dict[str, tuple[int, tuple[float, float]]] = {
    "pd_ee_delta_pos": (4, (0.1, 0.0)),
    "pd_ee_delta_pose": (7, (0.1, 0.1)),
    "pd_ee_target_delta_pos": (4, (0.1, 0.0)),
    "pd_ee_target_delta_pose": (7, (0.1, 0.1)),
    WIDOWX_MODES[0]: (7, (1.0, 1.0)),
}
"""Control modes that move the tool of an arm with a gripper: numbers of an action, and what 1 means
in it (m, rad)."""
STATE_DIM = 8
"""Pose of the tool and a finger."""
PANDA_JOINTS, WIDOWX_JOINTS = 9, 8
PHOTOGRAPH = (480, 640)
"""Height and width of the picture of tasks before a photograph, pixels."""
EXPERT_MODES = ("pd_ee_delta_pos", "pd_ee_delta_pose")
"""Control modes that the scripted experts support."""

WIDOWX_MARKER = "data/robots/widowx/wx250s.urdf"
BRIDGE_MARKERS = (
    "data/tasks/bridge_v2_real2sim_dataset/custom/info_bridge_custom_v0.json",
    WIDOWX_MARKER,
)
SCENE25_MARKERS = (
    "data/tasks/bridge_v2_real2sim_dataset/stages/bridge_table_1_v1.glb",
    WIDOWX_MARKER,
)
"""Files of the bridge tasks and of PutOnPlateInScene25, relative to the asset directory.

ManiSkill checks directories only, and accepts the empty one that a failed download leaves.
"""

PLATE_SPLITS = {
    "main": "nothing: training",
    "unseen_table": "5 unseen table tops",
    "texture_weak": "30 % of robot, objects and receptacles is coloured cells",
    "texture_strong": "50 % of robot, objects and receptacles is coloured cells",
    "noise_weak": "30 % of the image is coloured cells",
    "noise_strong": "50 % of the image is coloured cells",
    "unseen_object": "9 unseen objects",
    "unseen_receptacle": "16 unseen receptacles",
    "unseen_instruction": "16 unseen wordings",
    "two_objects": "a second object, both seen in training",
    "two_unseen_objects": "two unseen objects",
    "two_receptacles": "a second receptacle, unseen",
    "two_unseen_receptacles": "two unseen receptacles",
    "position": "places around the grid, other turns of the object",
    "robot_pose": "another initial pose of the robot",
    "moved_object": "the object moves in the middle of an episode",
    "camera": "another camera pose",
}
"""Splits of PutOnPlate25, defined in ``plates_splits``, and what each changes."""

View = tuple[tuple[float, float, float], tuple[float, float, float], float]
"""Camera position and the point it faces (m, table frame), and field of view (rad)."""


@dataclass(frozen=True)
class TaskEntry:
    gym_id: str
    instruction: str
    """An example if the task draws its instruction per episode."""
    limit: int
    """Control steps per episode."""
    has_expert: bool = False
    robot: str | None = "panda"
    """None keeps the default robot of the task."""
    control_modes: tuple[str, ...] = PANDA_MODES
    rewards: tuple[str, ...] = REWARDS
    camera: str = "base_camera"
    close_view: View | None = ((0.55, 0.0, 0.55), (0.05, 0.0, 0.03), 1.0)
    """The camera ``close``; None if only the task's own camera sees everything."""
    bridge: bool = False
    """A digital twin of BridgeData V2: needs assets, and has its own picture and image names."""
    split: str | None = None
    """Of PutOnPlate25."""
    scene25: tuple[str, str] | None = None
    """Task and set of objects of PutOnPlateInScene25."""
    control_hz: float = 20.0
    draws_instruction: bool = False
    note: str = ""


def _plates(split: str) -> tuple[str, TaskEntry]:
    """Name and entry of a split of PutOnPlate25."""
    suffix = "" if split == "main" else "".join(word.capitalize() for word in split.split("_"))
    return f"PutOnPlate25{suffix}", TaskEntry(
        "PutOnPlate25-v1",
        "put the red cube on the plate",
        80,
        has_expert=True,
        close_view=((0.4, 0.0, 0.44), (-0.04, 0.0, 0.03), 0.82),
        split=split,
        draws_instruction=True,
        note=f"changes {PLATE_SPLITS[split]}",
    )


def _bridge(gym_id: str, instruction: str, limit: int = 60) -> TaskEntry:
    return TaskEntry(
        gym_id,
        instruction,
        limit,
        robot=None,
        control_modes=WIDOWX_MODES,
        rewards=("sparse",),
        camera="3rd_view_camera",
        close_view=None,
        bridge=True,
        control_hz=5.0,
        draws_instruction=True,
        note="WidowX; needs downloaded assets",
    )


def _scene25(task: str, obj_set: str) -> tuple[str, TaskEntry]:
    """Name and entry of a published task; a set other than that of training ends its name."""
    name = PREFIX + task + ("" if obj_set == TRAIN else f"-{obj_set}")
    bridge = _bridge(f"{PREFIX}-v1", "put carrot on plate", 80)
    return name, replace(bridge, rewards=("sparse", "progress"), scene25=(task, obj_set))


TASKS: dict[str, TaskEntry] = {
    "PushCube": TaskEntry(
        "PushCube-v1", "push the blue cube to the red and white target", 50, has_expert=True
    ),
    "PickCube": TaskEntry(
        "PickCube-v1",
        "pick up the red cube and hold it still at the goal",
        50,
        has_expert=True,
        note="the goal is not in the images: a policy that sees only images and text cannot solve it",
    ),
    "StackCube": TaskEntry(
        "StackCube-v1", "stack the red cube on the green cube", 50, has_expert=True
    ),
    "PutOnPlate": TaskEntry(
        "PutOnPlate-v1",
        "put the red cube on the plate",
        50,
        has_expert=True,
        close_view=((0.5, 0.0, 0.5), (0.0, 0.0, 0.05), 0.8),
        draws_instruction=True,
        note="the cube is red, green or blue, drawn per episode",
    ),
    **dict(map(_plates, PLATE_SPLITS)),
    "PullCube": TaskEntry("PullCube-v1", "pull the blue cube to the red and white target", 50),
    "PokeCube": TaskEntry("PokeCube-v1", "poke the red cube with the peg", 50),
    "PullCubeTool": TaskEntry("PullCubeTool-v1", "pull the blue cube closer with the tool", 100),
    "RollBall": TaskEntry(
        "RollBall-v1", "roll the blue ball to the red and white target", 80, close_view=None
    ),
    "PlaceSphere": TaskEntry("PlaceSphere-v1", "put the blue ball in the bin", 50),
    "LiftPegUpright": TaskEntry("LiftPegUpright-v1", "stand the peg upright", 50),
    "PegInsertionSide": TaskEntry(
        "PegInsertionSide-v1",
        "insert the peg into the hole in the side of the box",
        100,
        robot=None,
        close_view=None,
    ),
    "PlugCharger": TaskEntry(
        "PlugCharger-v1",
        "plug the charger into the receptacle",
        200,
        robot=None,
        rewards=("sparse",),
        close_view=None,
    ),
    "StackPyramid": TaskEntry(
        "StackPyramid-v1",
        "put the red cube beside the green cube and the blue cube on top of both",
        250,
        rewards=("sparse",),
    ),
    "PushT": TaskEntry(
        "PushT-v1", "push the T to the T-shaped target", 100, robot=None, close_view=None
    ),
    "FMBAssembly1Easy": TaskEntry(
        "FMBAssembly1Easy-v1",
        "assemble the parts on the red board",
        500,
        rewards=("sparse",),
        close_view=None,
    ),
    "PickCubeSO100": TaskEntry(
        "PickCubeSO100-v1",
        "pick up the red cube and hold it still at the goal",
        50,
        robot=None,
        control_modes=SO100_MODES,
        close_view=None,
        note="SO-100 arm; the goal is not in the images",
    ),
    "PutCarrotOnPlate": _bridge("PutCarrotOnPlateInScene-v1", "put carrot on plate"),
    "PutSpoonOnTowel": _bridge("PutSpoonOnTableClothInScene-v1", "put the spoon on the towel"),
    "StackGreenOnYellow": _bridge(
        "StackGreenCubeOnYellowCubeBakedTexInScene-v1", "stack the green block on the yellow block"
    ),
    "PutEggplantInBasket": _bridge(
        "PutEggplantInBasketScene-v1", "put eggplant into yellow basket", 120
    ),
    **dict(_scene25(task, obj_set) for task in SCENE25_TASKS for obj_set in OBJECT_SETS),
}


def asset_dir(configured: str | None) -> Path:
    """Folder of ManiSkill's downloads."""
    return (
        Path(configured or os.environ.get("MS_ASSET_DIR") or Path.home() / ".maniskill")
        .expanduser()
        .absolute()
    )


def missing_assets(entry: TaskEntry, configured_dir: str | None) -> list[Path]:
    """Files that the task needs and that are missing."""
    directory = asset_dir(configured_dir)
    needed = [
        directory / marker for marker in BRIDGE_MARKERS if entry.bridge and entry.scene25 is None
    ]
    if entry.scene25 is not None:
        needed = [
            *(directory / marker for marker in SCENE25_MARKERS),
            *scene25_assets.markers(directory),
        ]
    return [path for path in needed if not path.exists()]


def download(entry: TaskEntry, configured_dir: str | None) -> str:
    """Return the command that fetches what the task needs."""
    directory = asset_dir(configured_dir)
    fetch = "python -m mani_skill.utils.download_asset -y"
    prefix = "" if configured_dir is None else f"MS_ASSET_DIR={directory} "
    command = " && ".join(
        f"{prefix}{fetch} {name}" for name in ("bridge_v2_real2sim", "widowx250s")
    )
    return f"{command} && {scene25_assets.download(directory)}" if entry.scene25 else command

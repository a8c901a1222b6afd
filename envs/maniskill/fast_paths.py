"""Shorter ways to ManiSkill's numbers: for all environments, and for a single one on the CPU.

A new scene parses the robot's description again and copies the settings of all its controllers
twice. A control step multiplies a dozen quaternions, each with thirty operations on tensors of one
element, and computes the arm's pose twice.
"""

from __future__ import annotations

import gc
from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_FACTORS = np.array([[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]])
"""Row i: which component of the right quaternion component i of the left one meets, per result."""
_SIGNS = np.array([[1, 1, 1, 1], [-1, 1, -1, 1], [-1, 1, 1, -1], [-1, -1, 1, 1]], np.float32)
_CONJUGATE = np.array([1, -1, -1, -1], np.float32)
Numbers = NDArray[np.float32]


def product(left: Numbers, right: Numbers) -> Numbers:
    """Product of quaternions w x y z ``[..., 4]``: the bits of ManiSkill's, sums in its order."""
    terms = left[..., :, None] * (right[..., _FACTORS] * _SIGNS)
    return terms[..., 0, :] + terms[..., 1, :] + terms[..., 2, :] + terms[..., 3, :]


def multiply(left: Tensor, right: Tensor) -> Tensor:
    return torch.from_numpy(product(left.numpy(), right.numpy()))


def rotated(quaternion: Numbers, point: Numbers) -> Numbers:
    """Points ``[..., 3]`` rotated by quaternions ``[..., 4]``."""
    whole = np.zeros((*point.shape[:-1], 4), np.float32)
    whole[..., 1:] = point
    return product(product(quaternion, whole), quaternion * _CONJUGATE)[..., 1:]


def rotate(quaternion: Tensor, point: Tensor) -> Tensor:
    return torch.from_numpy(rotated(quaternion.numpy(), point.numpy()))


def chained(first: Numbers, second: Numbers) -> Numbers:
    """Product of poses ``[..., 7]``, position and quaternion, whose real part is not negative."""
    quaternion = product(first[..., 3:], second[..., 3:])
    quaternion = np.where(quaternion[..., :1] < 0, -quaternion, quaternion)
    return np.concatenate(
        (first[..., :3] + rotated(first[..., 3:], second[..., :3]), quaternion), -1
    )


def tool_at_base(controller: Any) -> Numbers:
    """Pose ``[7]`` of an arm's tool in the frame of its base."""
    base, tool = (link._objs[0].entity_pose for link in (controller.root_link, controller.ee_link))
    turn = base.q * _CONJUGATE
    return chained(np.concatenate((rotated(turn, -base.p), turn)), np.concatenate((tool.p, tool.q)))


@cache
def install() -> None:
    """Replace functions of ManiSkill in this process, which must simulate on the CPU only.

    Each robot description is parsed once, so its files must not change while the process lives.
    Memory holds up to seven scenes that are no longer used.
    """
    import sapien
    from mani_skill.agents.controllers import PDEEPosController, PDEEPosControllerConfig
    from mani_skill.agents.robots.panda import panda
    from mani_skill.envs import sapien_env
    from mani_skill.utils.building.urdf_loader import URDFLoader
    from mani_skill.utils.geometry import rotation_conversions
    from mani_skill.utils.structs import Pose
    from mani_skill.utils.structs import pose as poses

    rotation_conversions.quaternion_raw_multiply = multiply
    poses.quaternion_apply = rotate
    create = Pose.create.__func__

    def pose_of(cls: Any, pose: Any, device: Any = None) -> Any:
        if isinstance(pose, list) and isinstance(pose[0], sapien.Pose):
            return cls(
                raw_pose=torch.from_numpy(
                    np.array([np.concatenate((item.p, item.q)) for item in pose])
                )
            )
        return create(cls, pose, device)

    def times(self: Any, other: Any) -> Any:
        return Pose(
            raw_pose=torch.from_numpy(
                chained(self.raw_pose.numpy(), Pose.create(other).raw_pose.numpy())
            )
        )

    Pose.create = classmethod(pose_of)
    Pose.__mul__ = times
    set_action = PDEEPosController.set_action

    def set_action_in_numpy(self: Any, action: Any) -> None:
        config = self.config
        solver = self.kinematics
        start = self.articulation._objs[0].qpos
        if config.use_target or config.interpolate:  # these keep state between steps
            return set_action(self, action)
        tool = tool_at_base(self)
        action = self._preprocess_action(action)
        if (
            type(config) is PDEEPosControllerConfig
            and config.use_delta
            and config.frame == "root_translation"
        ):
            target = sapien.Pose(action.numpy()[0] + tool[:3], tool[3:])
        else:
            target = self.compute_target_pose(
                Pose(raw_pose=torch.from_numpy(tool[None])), action
            ).sp
        initial_angles = start[solver.pmodel_active_joint_indices]
        controlled = solver.pmodel_controlled_joint_indices
        solution, solved, _ = solver.pmodel.compute_inverse_kinematics(
            solver.end_link_idx, target, initial_angles, solver.qmask, max_iterations=100
        )
        angles = (
            solution[controlled].astype(np.float32) if solved else start[self.active_joint_indices]
        )
        for joint, angle in zip(self.joints, angles, strict=True):
            joint._objs[0].drive_target = angle[None]

    PDEEPosController.set_action = set_action_in_numpy
    parse = URDFLoader.parse
    parsed = dict[Any, Any]()

    def parse_once(
        self: Any, urdf_file: str, srdf_file: str | None = None, package_dir: str | None = None
    ) -> Any:
        key = (
            urdf_file,
            srdf_file,
            package_dir,
            self.name,
            self.fix_root_link,
            type(self)._build_link,
        )
        if key not in parsed:
            parsed[key] = parse(self, urdf_file, srdf_file, package_dir)
        for builder in (*parsed[key]["articulation_builders"], *parsed[key]["actor_builders"]):
            builder.set_scene(self.scene)
            builder.scene_idxs = builder.initial_pose = None  # as after parsing; building sets them
        return parsed[key]

    URDFLoader.parse = parse_once
    left = count(1)  # of these scenes every eighth collects garbage, which takes 2 ms
    sapien_env.gc = SimpleNamespace(collect=lambda: None if next(left) % 8 else gc.collect())
    panda.deepcopy_dict = lambda configs: (
        configs
    )  # made anew by each call, and a scene uses those of one control mode
    torch.manual_seed = lambda seed: torch.default_generator.manual_seed(
        int(seed)
    )  # PyTorch's also formats a trace per kind of GPU


@cache
def install_shared() -> None:
    """Replace functions of ManiSkill in this process, for any number of environments on any device.

    Inverse kinematics is SAPIEN's own. With the package ``pin`` it would be Python's, which takes
    longer than the rest of a control step and differs in the last bits.

    The renderer does without its table of reflectances, which a software driver computes at the
    first picture of a process, for about 4 s. Only the light of an environment map is multiplied
    with it, so a scene that has one keeps the table.
    """
    from mani_skill.agents.controllers.utils import kinematics
    from mani_skill.utils.structs.render_camera import RenderCamera
    from sapien.pysapien_pinocchio import PinocchioModel
    from sapien.render import RenderTexture

    model_of = cache(
        PinocchioModel
    )  # what it keeps is the order of the joints, which the description decides
    kinematics.PinocchioModel = lambda description, gravity: model_of(description, tuple(gravity))
    create = RenderCamera.create.__func__

    def camera_of(cls: Any, render_cameras: list[Any], scene: Any, mount: Any = None) -> Any:
        for camera, part in zip(render_cameras, scene.sub_scenes, strict=True):
            if part.render_system.cubemap is None:
                camera.set_texture(
                    "BRDFLUT",
                    RenderTexture(np.zeros((1, 1, 4), np.float32), 2, "R32G32B32A32Sfloat"),
                )
        return create(cls, render_cameras, scene, mount)

    RenderCamera.create = classmethod(camera_of)

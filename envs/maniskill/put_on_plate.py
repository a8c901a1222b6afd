"""Task PutOnPlate-v1: put one of three coloured cubes, named by the instruction, on a plate.

Needs no downloaded assets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import sapien
import torch
from mani_skill.agents.robots import Panda
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.sensors.camera import CameraConfig
from mani_skill.utils import sapien_utils
from mani_skill.utils.building import actors
from mani_skill.utils.registration import register_env
from mani_skill.utils.scene_builder.table import TableSceneBuilder
from mani_skill.utils.structs import Actor, Pose
from numpy.typing import NDArray
from torch import Tensor

from .rows import by_row

COLOURS = {"red": (0.9, 0.05, 0.05), "green": (0.05, 0.75, 0.1), "blue": (0.05, 0.15, 0.95)}
CUBE_HALF_SIZE = 0.02
PLATE_RADIUS = 0.07
PLATE_HALF_THICKNESS = 0.005
CUBE_PLACES = np.array([[-0.06, -0.17], [0.08, -0.095], [-0.06, -0.02]])
"""Cube centres (x, y) before ``JITTER``, metres, table frame; a gripper fits around each."""
PLATE_PLACE = np.array([0.0, 0.14])
HALF_WAY = 0.5
JITTER = 0.025
"""Largest offset of cubes and plate from their places along x and y, metres."""


def sample_layout(
    rng: np.random.RandomState,
) -> tuple[int, NDArray[np.float64], NDArray[np.float64]]:
    """Draw the layout of an episode; each cube may take any of the places.

    Returns index into COLOURS, plate centre ``[2]`` and cube centres ``[3, 2]``, metres.
    """
    target = rng.randint(len(COLOURS))
    cubes = rng.permutation(CUBE_PLACES) + rng.uniform(-JITTER, JITTER, CUBE_PLACES.shape)
    return target, PLATE_PLACE + rng.uniform(-JITTER, JITTER, 2), cubes


@register_env("PutOnPlate-v1", max_episode_steps=50)
class PutOnPlateEnv(BaseEnv):
    """Put the instructed cube on the plate.

    Success: the cube rests on the plate and is released. There is no failure. Dense rewards are 0
    at first, ``HALF_WAY`` while the cube is grasped or on the plate, 1 on success.
    """

    SUPPORTED_ROBOTS = ["panda"]  # noqa: RUF012  (the base class's own declaration)
    SUPPORTED_REWARD_MODES = ("sparse", "normalized_dense", "dense", "none")
    agent: Panda

    def __init__(
        self,
        *args: Any,
        robot_uids: str = "panda",
        robot_init_qpos_noise: float = 0.02,
        **kwargs: Any,
    ) -> None:
        self.robot_init_qpos_noise = robot_init_qpos_noise
        super().__init__(*args, robot_uids=robot_uids, **kwargs)

    @property
    def _default_sensor_configs(self) -> list[CameraConfig]:
        pose = sapien_utils.look_at(eye=[0.3, 0, 0.6], target=[-0.1, 0, 0.1])
        return [CameraConfig("base_camera", pose, 128, 128, np.pi / 2, 0.01, 100)]

    @property
    def _default_human_render_camera_configs(self) -> CameraConfig:
        pose = sapien_utils.look_at([0.6, 0.7, 0.6], [0.0, 0.0, 0.35])
        return CameraConfig("render_camera", pose, 512, 512, 1, 0.01, 100)

    def _load_agent(self, options: dict[str, Any]) -> None:
        super()._load_agent(options, sapien.Pose(p=[-0.615, 0, 0]))

    def _load_scene(self, options: dict[str, Any]) -> None:
        self.table_scene = TableSceneBuilder(
            env=self, robot_init_qpos_noise=self.robot_init_qpos_noise
        )
        self.table_scene.build()
        self.objects: dict[int, Actor] = {
            i: actors.build_cube(
                self.scene,
                half_size=CUBE_HALF_SIZE,
                color=[*colour, 1],
                name=f"{name}_cube",
                initial_pose=sapien.Pose(p=[0.1 * i, 0, CUBE_HALF_SIZE]),
            )
            for i, (name, colour) in enumerate(COLOURS.items())
        }
        self.plate = actors.build_cylinder(
            self.scene,
            radius=PLATE_RADIUS,
            half_length=PLATE_HALF_THICKNESS,
            color=[0.95, 0.95, 0.95, 1],
            name="plate",
            body_type="kinematic",
            initial_pose=sapien.Pose(p=[0, 0.3, PLATE_HALF_THICKNESS]),
        )
        actors.build_box(
            self.scene,
            half_sizes=[0.17, 0.25, 0.0005],
            color=[0.15, 0.15, 0.17, 1],
            name="mat",  # dark, so that every colour stands out in a small image
            body_type="kinematic",
            add_collision=False,
            initial_pose=sapien.Pose(p=[0, 0, 0.0005]),
        )
        self.target = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        """Index into ``objects`` of the instructed one, int64 ``[num_envs]``."""

    def _initialize_episode(self, env_idx: Tensor, options: dict[str, Any]) -> None:
        layouts = [sample_layout(self._batched_episode_rng.rngs[i]) for i in env_idx.tolist()]
        self.table_scene.initialize(env_idx)
        self.target[env_idx] = torch.tensor(
            [target for target, _, _ in layouts], device=self.device
        )
        for i, cube in self.objects.items():
            cube.set_pose(self._resting([cubes[i] for _, _, cubes in layouts], CUBE_HALF_SIZE))
        half_turn = [
            np.cos(np.pi / 4),
            0.0,
            np.sin(np.pi / 4),
            0.0,
        ]  # turns a cylinder's axis, its x, upright
        self.plate.set_pose(
            self._resting([plate for _, plate, _ in layouts], PLATE_HALF_THICKNESS, half_turn)
        )

    def _resting(
        self,
        centres: list[NDArray[np.float64]],
        height: float,
        quaternion: list[float] | None = None,
    ) -> Pose:
        """Poses ``[b]`` on the table: ``centres`` (x, y) and ``height`` of the centre above it."""
        xy = torch.tensor(np.stack(centres), dtype=torch.float32, device=self.device)
        xyz = torch.cat([xy, torch.full_like(xy[:, :1], height)], dim=1)
        return Pose.create_from_pq(
            xyz, torch.tensor(quaternion or [1.0, 0.0, 0.0, 0.0], device=self.device)
        )

    def get_language_instruction(self) -> list[str]:
        """One instruction per environment."""
        names = list(COLOURS)
        return [f"put the {names[i]} cube on the plate" for i in self.target.tolist()]

    def of_target(self, question: Callable[[Actor], Tensor]) -> Tensor:
        """Apply ``question`` to the instructed object of each environment: ``[num_envs, ...]``."""
        return by_row(self.target.tolist(), lambda index: question(self.objects[index]))

    def evaluate(self) -> dict[str, Tensor]:
        cube = self.of_target(lambda cube: cube.pose.p)
        offset = cube - self.plate.pose.p
        centred = offset[:, :2].norm(dim=1) < PLATE_RADIUS - CUBE_HALF_SIZE / 2
        resting = (offset[:, 2] - PLATE_HALF_THICKNESS - CUBE_HALF_SIZE).abs() < 0.005
        return self.judge(centred & resting, cube, CUBE_HALF_SIZE)

    def judge(
        self, on_plate: Tensor, place: Tensor, half_width: float | Tensor
    ) -> dict[str, Tensor]:
        """Return ``is_on_plate`` and ``success``: on the plate, released and ``at_rest``.

        ``place``: of the instructed object, ``[num_envs, 3]``; a finger is open beyond
        ``half_width``, metres.
        """
        wide_open = self.agent.robot.get_qpos()[:, -1] > half_width + 0.002
        away = (self.agent.tcp.pose.p - place).norm(dim=1) > 0.05
        success = on_plate & (wide_open | away)
        if success.any():  # contacts take a quarter of a control step
            success &= self.of_target(self.at_rest)
        return {"is_on_plate": on_plate, "success": success}

    def at_rest(self, thing: Actor) -> Tensor:
        return thing.is_static(lin_thresh=1e-2, ang_thresh=0.5)

    def compute_dense_reward(self, obs: Any, action: Tensor, info: dict[str, Tensor]) -> Tensor:
        half_way = self.of_target(self.agent.is_grasping) | info["is_on_plate"]
        return torch.where(info["success"], 1.0, half_way * HALF_WAY)

    compute_normalized_dense_reward = compute_dense_reward

    def _get_obs_extra(self, info: dict[str, Any]) -> dict[str, Tensor]:
        return {"tcp_pose": self.agent.tcp.pose.raw_pose}

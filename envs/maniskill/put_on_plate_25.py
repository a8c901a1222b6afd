"""Task PutOnPlate25-v1: put one of many objects on a receptacle; a split names what is unusual.

Needs no downloaded assets. ``plates_splits`` draws the episodes, ``plates_parts`` and
``plates_tables`` have what is in the scene.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import sapien
import torch
from mani_skill.sensors.camera import CameraConfig
from mani_skill.utils.registration import register_env
from mani_skill.utils.scene_builder.table import TableSceneBuilder
from mani_skill.utils.structs import Actor, Pose
from torch import Tensor
from transforms3d.euler import euler2quat

from .plates_parts import OBJECTS, RECEPTACLES, Part
from .plates_splits import CENTRE, MOVE_STEP, SPLITS, Episode, draw
from .plates_tables import overlay, table_texture
from .put_on_plate import PutOnPlateEnv
from .rows import stacked_poses

TABLE_CENTRE = (-0.135, 0.0, 0.0005)
TABLE_HALF_SIZES = (1.2, 0.6)
"""Of the table tops, metres: they cover the table. The half sizes are those along y and x."""
PARKED = (3.0, -2.0, -0.9196429)
"""On the floor behind the camera: where the first hidden actor is, metres."""
FRICTION = 1.0
UPRIGHT = sapien.Pose(q=[np.cos(np.pi / 4), 0.0, np.sin(np.pi / 4), 0.0])
"""Turns a cylinder's axis, its x, upright."""


@cache
def table_material(table: int) -> sapien.render.RenderMaterial:
    rgba = np.dstack([table_texture(table), np.full(table_texture(table).shape[:2], 255, np.uint8)])
    material = sapien.render.RenderMaterial()
    material.base_color_texture = sapien.render.RenderTexture2D(
        np.ascontiguousarray(rgba), "R8G8B8A8Unorm", srgb=True
    )
    material.roughness = 0.9
    material.specular = 0.1
    return material


@register_env("PutOnPlate25-v1", max_episode_steps=80)
class PutOnPlate25Env(PutOnPlateEnv):
    """Put the instructed object on the instructed receptacle.

    Success: the object rests on the receptacle and is released. Rewards are those of PutOnPlate.
    """

    def __init__(self, *args: Any, split: str = "main", **kwargs: Any) -> None:
        self.split = SPLITS[split]
        if self.split.foreground:
            kwargs["obs_mode"] = "rgb+segmentation"
        super().__init__(*args, **kwargs)

    @property
    def _default_sensor_configs(self) -> list[CameraConfig]:
        (camera,) = super()._default_sensor_configs
        camera.mount = self.camera_mount
        return [camera]

    def _load_scene(self, options: dict[str, Any]) -> None:
        split = self.split
        self.table_scene = TableSceneBuilder(
            env=self, robot_init_qpos_noise=self.robot_init_qpos_noise
        )
        self.table_scene.build()
        self.objects = {
            i: self._build(OBJECTS[i].name, OBJECTS[i].parts, OBJECTS[i].grip)
            for i in split.objects
        }
        indices = sorted({*split.receptacles, *split.second_receptacles})
        self.receptacles = {
            i: self._build(RECEPTACLES[i].name, RECEPTACLES[i].parts, None) for i in indices
        }
        self.tables = {i: self._build_table(i) for i in split.tables}
        mount = self.scene.create_actor_builder()
        mount.initial_pose = sapien.Pose()
        self.camera_mount = mount.build_kinematic("camera_mount")
        self.target = torch.full(
            (self.num_envs,), split.objects[0], dtype=torch.int64, device=self.device
        )
        self.episodes: list[Any] = [None] * self.num_envs
        self.receptacle_place = torch.zeros(self.num_envs, 3, device=self.device)
        """Where the surface of the instructed receptacle is, metres, ``[num_envs, 3]``."""
        self.sizes = torch.zeros(self.num_envs, 4, device=self.device)
        """Receptacle's radius; object's grip, radius and reach: metres, ``[num_envs, 4]``."""

    def _parked(self, height: float) -> sapien.Pose:
        """A place of its own, ``height`` above the floor, for the next actor that is built."""
        x, y, z = PARKED
        return sapien.Pose([x, y + 0.2 * len(self.scene.actors), z + height])

    def _build(self, name: str, parts: tuple[Part, ...], grip: float | None) -> Actor:
        """An object with its origin ``grip`` above the table; without one, a kinematic body."""
        builder = self.scene.create_actor_builder()
        material = sapien.physx.PhysxMaterial(FRICTION, FRICTION, 0.0)
        for part in parts:
            at = sapien.Pose([part.at[0], part.at[1], part.at[2] - (grip or 0.0)])
            sizes: dict[str, Any] = {"radius": part.size[0]}
            if part.shape == "box":
                sizes = {"half_size": part.size}
            elif part.shape != "sphere":
                sizes["half_length"] = part.size[1]
            if part.shape == "cylinder":
                at = at * UPRIGHT
            getattr(builder, f"add_{part.shape}_collision")(pose=at, material=material, **sizes)
            getattr(builder, f"add_{part.shape}_visual")(pose=at, material=part.colour, **sizes)
        builder.initial_pose = self._parked(grip or 0.0)
        return builder.build_kinematic(name) if grip is None else builder.build(name)

    def _build_table(self, table: int) -> Actor:
        builder = self.scene.create_actor_builder()
        flat = sapien.Pose(q=euler2quat(0, -np.pi / 2, 0))  # a plane faces x
        builder.add_plane_visual(
            pose=flat, scale=(1.0, *TABLE_HALF_SIZES), material=table_material(table)
        )
        builder.initial_pose = self._parked(0.0)
        return builder.build_kinematic(f"table {table}")

    def _initialize_episode(self, env_idx: Tensor, options: dict[str, Any]) -> None:
        rows = env_idx.tolist()
        for row in rows:
            self.episodes[row] = draw(self.split, self._batched_episode_rng.rngs[row])
        drawn = [self.episodes[row] for row in rows]
        self.table_scene.initialize(env_idx)
        if self.split.robot_pose:
            qpos = self.agent.robot.get_qpos()[env_idx].cpu().numpy()
            qpos[:, :7] += np.stack([episode.robot_pose for episode in drawn])
            self.agent.reset(qpos)
        for i, actor in self.objects.items():
            self._show(actor, [self._object_pose(episode, i) for episode in drawn])
        for i, actor in self.receptacles.items():
            self._show(actor, [_receptacle_pose(episode, i) for episode in drawn])
        for i, actor in self.tables.items():
            self._show(
                actor,
                [sapien.Pose(TABLE_CENTRE) if episode.table == i else None for episode in drawn],
            )
        self.camera_mount.set_pose(
            Pose.create(
                stacked_poses([_camera_turn(*episode.camera) for episode in drawn], self.device)
            )
        )
        self.target[env_idx] = torch.tensor(
            [episode.object for episode in drawn], device=self.device
        )
        surfaces = [
            [*episode.receptacle_place, RECEPTACLES[episode.receptacle].surface]
            for episode in drawn
        ]
        self.receptacle_place[env_idx] = torch.tensor(
            np.array(surfaces), dtype=torch.float32, device=self.device
        )
        things = [(RECEPTACLES[episode.receptacle], OBJECTS[episode.object]) for episode in drawn]
        sizes = [
            [receptacle.radius, thing.grip, thing.radius, thing.reach]
            for receptacle, thing in things
        ]
        self.sizes[env_idx] = torch.tensor(sizes, device=self.device)

    def _object_pose(self, episode: Episode, index: int) -> sapien.Pose | None:
        for number, position in (
            (episode.object, episode.object_place),
            (episode.second_object, episode.third_place),
        ):
            if number == index:
                return sapien.Pose([*position, OBJECTS[index].grip], euler2quat(0, 0, episode.yaw))
        return None

    def _show(self, actor: Actor, poses: list[sapien.Pose | None]) -> None:
        """Put an actor where each episode has it, or where it is parked."""
        parked = actor.initial_pose.sp
        actor.set_pose(Pose.create(stacked_poses([pose or parked for pose in poses], self.device)))

    def _before_control_step(self) -> None:
        if not self.split.moves:
            return
        rows = (self.elapsed_steps == MOVE_STEP).nonzero()[:, 0].tolist()
        for row in rows:
            episode = self.episodes[row]
            pose = sapien.Pose(
                [*episode.third_place, OBJECTS[episode.object].grip], euler2quat(0, 0, episode.yaw)
            )
            self.scene._reset_mask = torch.zeros_like(self.scene._reset_mask)
            self.scene._reset_mask[row] = True
            self.objects[episode.object].set_pose(Pose.create(stacked_poses([pose], self.device)))
        if rows:
            self.scene._reset_mask = torch.ones_like(self.scene._reset_mask)
            if self.gpu_sim_enabled:
                self.scene._gpu_apply_all()

    def _get_obs_sensor_data(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        data: dict[str, Any] = super()._get_obs_sensor_data(*args, **kwargs)
        if self.split.noise:
            for images in data.values():
                seen = images["rgb"]
                images["rgb"] = self._noisy(seen)
                if self.split.foreground:
                    images["rgb"] = torch.where(
                        torch.isin(images.pop("segmentation"), self._foreground),
                        images["rgb"],
                        seen,
                    )
        return data

    def _after_reconfigure(self, options: dict[str, Any]) -> None:
        things = [*self.objects.values(), *self.receptacles.values(), *self.agent.robot.get_links()]
        self._foreground = (
            torch.cat([thing.per_scene_id for thing in things]).unique().to(torch.int16)
        )
        """Numbers of robot, objects and receptacles in a segmentation."""

    def _noisy(self, images: Tensor) -> Tensor:
        """Blend each episode's overlay, which moves with the tool, into ``[num_envs, H, W, 3]``."""
        height, width = images.shape[1:3]
        tool = (self.agent.tcp.pose.p[:, :2].cpu().numpy() - CENTRE) / 0.6 + 0.5
        blended = images.float()
        for row, episode in enumerate(self.episodes):
            top, left = (np.clip(tool[row], 0.0, 1.0) * (height, width)).astype(int)
            patch = overlay(episode.overlay, height, width)[top : top + height, left : left + width]
            blended[row] = (
                blended[row] * (1 - self.split.noise)
                + torch.from_numpy(patch).to(images.device) * self.split.noise
            )
        return blended.round().to(torch.uint8)

    def get_language_instruction(self) -> list[str]:
        return [episode.instruction for episode in self.episodes]

    @property
    def goal(self) -> Tensor:
        """Where the instructed object rests on the receptacle, metres, ``[num_envs, 3]``."""
        return self.receptacle_place + self.sizes[:, 1:2] * torch.tensor(
            [0.0, 0.0, 1.0], device=self.device
        )

    def evaluate(self) -> dict[str, Tensor]:
        receptacle, _, radius, reach = self.sizes.unbind(dim=1)
        position = self.of_target(lambda thing: thing.pose.p)
        offset = position - self.receptacle_place
        centred = offset[:, :2].norm(dim=1) < receptacle - 0.01
        resting = (offset[:, 2] > 0.005) & (offset[:, 2] < reach + 0.005)  # upright or on its side
        return self.judge(
            centred & resting, position, torch.minimum(radius, radius.new_tensor(0.033))
        )

    def at_rest(self, thing: Actor) -> Tensor:
        return super().at_rest(thing) & ~self.agent.is_grasping(thing)


def _receptacle_pose(episode: Episode, index: int) -> sapien.Pose | None:
    positions = {
        episode.second_receptacle: episode.third_place,
        episode.receptacle: episode.receptacle_place,
    }
    return sapien.Pose([*positions[index], 0.0]) if index in positions else None


def _camera_turn(azimuth: float, elevation: float) -> sapien.Pose:
    """A turn of the camera about the middle of the places."""
    middle = sapien.Pose([*CENTRE, 0.0])
    return middle * sapien.Pose(q=euler2quat(0.0, elevation, azimuth)) * middle.inv()

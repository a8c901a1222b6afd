"""The published tasks PutOnPlateInScene25 of RL4VLA and RLinf, on the published assets.

A WidowX puts an object on a receptacle before the photograph of a table. Scene, start, rules and
picture are those of RLinf at a3816b59 (``rlinf/envs/maniskill/tasks/``), or of RL4VLA at 55f966d6;
docs/results/put_on_plate_in_scene25.md compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sapien
import torch
from mani_skill import ASSET_DIR
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.envs.tasks.digital_twins.bridge_dataset_eval.base_env import (
    BaseBridgeEnv,
    WidowX250SBridgeDatasetFlatTable,
)
from mani_skill.utils import sapien_utils
from mani_skill.utils.geometry.rotation_conversions import quaternion_to_matrix
from mani_skill.utils.registration import register_env
from mani_skill.utils.structs import Actor, Pose
from mani_skill.utils.structs.types import SimConfig
from torch import Tensor

from . import scene25_assets, scene25_pictures
from .rows import by_row, stacked_poses
from .scene25_assets import Model
from .scene25_episodes import (
    JUMP_STEP,
    PUBLISHED,
    REST_QPOS,
    TRAIN,
    WORDINGS,
    Assets,
    Episodes25,
    Scene25Episode,
    joint_offsets,
    layouts,
    turned,
)
from .scene25_rules import Progress, on_plate, turned_size

BASE = (0.147, 0.028, 0.870)
"""Of the robot, metres; it faces -x."""
FACING = (0.0, 0.0, 0.0, 1.0)
"""Quaternion of the robot's base and of what is parked."""
OUT_OF_THE_WAY = 1.0
"""How much higher the base is while objects are placed, metres."""
STAGE = sapien.Pose([2.0634, 2.8313, 0.0])
UPRIGHT = sapien.Pose(q=[0.707, 0.707, 0.0, 0.0])
"""Turns the stage's file, in which y is up."""
SETTLE_STEPS, SETTLE_LONGER_STEPS = 50, 600
STILL = (0.001, 0.01)
"""RL4VLA's start: simulation steps, further ones if an object is faster than (m/s, rad/s)."""
RL4VLA_HEIGHT = 0.95
"""Of object and receptacle at RL4VLA's start, in layouts of two, metres."""
CAMERA = "3rd_view_camera"


@register_env("PutOnPlateInScene25-v1", max_episode_steps=80)
class Scene25Env(BaseEnv):
    """A task of ``scene25_episodes.TASKS``. Dense rewards are levels, whose changes are the
    published rewards."""

    SUPPORTED_ROBOTS = [WidowX250SBridgeDatasetFlatTable.uid]  # noqa: RUF012  (the base class's own declaration)
    draws_each_row = True
    """An episode depends on its own seed alone, also in a batch."""
    _load_lighting = BaseBridgeEnv._load_lighting
    _default_human_render_camera_configs = BaseBridgeEnv._default_human_render_camera_configs

    def __init__(
        self,
        *args: Any,
        task: str,
        obj_set: str,
        version: str,
        carrot: str,
        counts: Assets = PUBLISHED,
        **kwargs: Any,
    ) -> None:
        self.episodes = Episodes25(task, obj_set, counts)
        self.task = task
        self.obj_set = obj_set
        self.version = version
        self.whole = "Whole" in task
        self.strength = 0.3 if "03" in task else 0.5
        """How a Vision task disturbs pictures: all of them or what is shown, and by which share."""
        self.assets = scene25_assets.read(Path(carrot), counts)
        self.present: list[Scene25Episode] = []
        """Of each environment."""
        super().__init__(*args, robot_uids=WidowX250SBridgeDatasetFlatTable.uid, **kwargs)

    @property
    def _default_sim_config(self) -> SimConfig:
        return SimConfig(sim_freq=500, control_freq=5, spacing=20)

    def _load_agent(self, options: dict[str, Any]) -> None:
        super()._load_agent(options, sapien.Pose(BASE, FACING))

    def _load_scene(self, options: dict[str, Any]) -> None:
        for robot in self.agent.robot._objs:
            sapien_utils.set_articulation_render_material(robot, specular=0.9, roughness=0.3)
        stage = self.scene.create_actor_builder()
        file = str(ASSET_DIR / "tasks/bridge_v2_real2sim_dataset/stages/bridge_table_1_v1.glb")
        stage.add_nonconvex_collision_from_file(file, pose=UPRIGHT)
        stage.add_visual_from_file(file, pose=UPRIGHT)
        stage.initial_pose = STAGE
        stage.build_static(name="arena")
        only_one = 1 if self.task.startswith("Single") else None
        self.objects = [
            self._build(model, _parked(1.0, i))
            for i, model in enumerate(self.assets.objects[:only_one])
        ]
        with_plates = self.episodes.kind.plates == "set"
        plates = self.assets.plates if with_plates else self.assets.plates[:1]
        self.plates = [self._build(model, _parked(2.0, i)) for i, model in enumerate(plates)]
        self._forget()

    def _build(self, model: Model, parked: sapien.Pose) -> Actor:
        builder = self.scene.create_actor_builder()
        material = sapien.physx.PhysxMaterial(
            static_friction=1.0, dynamic_friction=1.0, restitution=0.0
        )
        builder.add_multiple_convex_collisions_from_file(
            str(model.collision), material=material, density=model.density
        )
        builder.add_visual_from_file(str(model.visual))
        builder.initial_pose = parked
        return builder.build(name=model.folder.name)

    def _forget(self) -> None:
        """Make what is remembered of each environment's episode."""
        self.present = [self.episodes[0]] * self.num_envs
        self.progress = Progress(self.num_envs, self.device)
        self.object_size = torch.zeros(self.num_envs, 3, device=self.device)
        """Of the box around the object as it was turned at reset, metres."""
        self.plate_size = torch.zeros_like(self.object_size)

    def _after_reconfigure(self, options: dict[str, Any]) -> None:
        things = [*self.objects, *self.plates, *self.agent.robot.get_links()]
        self._foreground = (
            torch.cat([thing.per_scene_id for thing in things]).unique().to(torch.int16)
        )
        tables = self.assets.tables
        self._photographs = scene25_pictures.stacked(
            tuple(table.photograph for table in tables)
        ).to(self.device)
        self._textures: Tensor | None = None
        if self.episodes.kind.extra == "texture":
            scale = 2 if self.whole else 1
            self._textures = scene25_pictures.stacked(
                tuple(table.texture for table in tables), scale
            ).to(self.device)

    def _initialize_episode(self, env_idx: Tensor, options: dict[str, Any]) -> None:
        rows = env_idx.tolist()
        ids = options.get("episode_id")
        if ids is None:
            ids = [self._batched_episode_rng.rngs[row].randint(len(self.episodes)) for row in rows]
        drawn = [self.episodes[int(number)] for number in ids]
        for row, episode in zip(rows, drawn, strict=True):
            self.present[row] = episode
        self.agent.robot.set_pose(sapien.Pose([*BASE[:2], BASE[2] + OUT_OF_THE_WAY], FACING))
        for i, actor in enumerate(self.objects):
            self._put(
                actor, [self._object_pose(episode, i) or _parked(1.0, i) for episode in drawn]
            )
        for i, actor in enumerate(self.plates):
            self._put(actor, [self._plate_pose(episode, i) or _parked(2.0, i) for episode in drawn])
        if self.version == "rl4vla":
            self._settle(env_idx)
        offsets = np.stack([self._joint_offset(episode) for episode in drawn]) + REST_QPOS
        self.agent.robot.set_pose(sapien.Pose(BASE, FACING))
        self.agent.reset(torch.tensor(offsets, dtype=torch.float32, device=self.device))
        self.progress.begin(env_idx)
        self.object_size[env_idx] = self._sizes("object", self.assets.objects)[env_idx]
        self.plate_size[env_idx] = self._sizes("plate", self.assets.plates)[env_idx]

    def _object_pose(self, episode: Scene25Episode, index: int) -> sapien.Pose | None:
        """Where an object begins; None if it is not shown."""
        places = self._places(episode)
        objects = [(episode.object, places[0])]
        if self.episodes.kind.extra == "object":
            objects.append((episode.extra, places[2]))
        for number, position in objects:
            if number == index:
                return sapien.Pose(position, turned(episode.turn))
        return None

    def _plate_pose(self, episode: Scene25Episode, index: int) -> sapien.Pose | None:
        places = self._places(episode)
        positions = {episode.plate: places[1]}
        if self.episodes.kind.extra == "plate":
            positions = {episode.extra: places[2]} | positions
        return sapien.Pose(positions[index]) if index in positions else None

    def _places(self, episode: Scene25Episode) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Places ``[2 or 3, 3]`` of an episode, metres."""
        places = layouts(self.episodes.kind.layout)[episode.pair]
        if self.version == "rl4vla" and len(places) == 2:
            return np.concatenate([places[:, :2], np.full((2, 1), RL4VLA_HEIGHT)], axis=1)
        return places

    def _joint_offset(self, episode: Scene25Episode) -> np.ndarray[Any, np.dtype[np.float64]]:
        return (
            joint_offsets()[episode.extra]
            if self.episodes.kind.extra == "joints"
            else np.zeros(len(REST_QPOS))
        )

    def _put(self, actor: Actor, poses: list[sapien.Pose]) -> None:
        """Put an actor into the rows that are being reset."""
        actor.set_pose(Pose.create(stacked_poses(poses, self.device)))

    def _settle(self, env_idx: Tensor) -> None:
        """Let the objects of these environments come to rest, and leave the others as they are."""
        others = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        others[env_idx] = False
        before = self.scene.get_sim_state() if others.any() else {}
        self._simulate(SETTLE_STEPS)
        speeds = [
            (
                self._of_object(Actor.get_linear_velocity),
                self._of_object(Actor.get_angular_velocity),
            )
        ]
        speeds.append(
            (self._of_plate(Actor.get_linear_velocity), self._of_plate(Actor.get_angular_velocity))
        )
        linear, angular = (
            sum(velocity[env_idx].norm(dim=1) for velocity in kind)
            for kind in zip(*speeds, strict=True)
        )
        if (linear > STILL[0]).any() or (angular > STILL[1]).any():
            self._simulate(SETTLE_LONGER_STEPS)
        if before:
            snapshot = {
                kind: {name: state[others] for name, state in states.items()}
                for kind, states in before.items()
            }
            self.scene.set_sim_state(snapshot, others.nonzero()[:, 0])

    def _simulate(self, steps: int) -> None:
        if self.gpu_sim_enabled:
            self.scene._gpu_apply_all()
        for _ in range(steps):
            self.scene.step()
        if self.gpu_sim_enabled:
            self.scene._gpu_fetch_all()

    def _of_object(self, question: Callable[[Actor], Tensor]) -> Tensor:
        """Apply ``question`` to the instructed object of each environment: ``[num_envs, ...]``."""
        return by_row(
            [episode.object for episode in self.present], lambda i: question(self.objects[i])
        )

    def _of_plate(self, question: Callable[[Actor], Tensor]) -> Tensor:
        return by_row(
            [episode.plate for episode in self.present], lambda i: question(self.plates[i])
        )

    def _between(self) -> Tensor:
        """Contact force between object and plate, newtons, ``[num_envs, 3]``."""
        pairs = [(episode.object, episode.plate) for episode in self.present]
        return by_row(
            pairs,
            lambda pair: self.scene.get_pairwise_contact_forces(
                self.objects[pair[0]], self.plates[pair[1]]
            ),
        )

    def _sizes(self, kind: str, models: tuple[Model, ...]) -> Tensor:
        """Sizes ``[num_envs, 3]`` of the boxes around objects or plates as they are turned now."""
        numbers = [getattr(episode, kind) for episode in self.present]
        unturned = torch.tensor(
            [models[number].size for number in numbers], dtype=torch.float32, device=self.device
        )
        ask = self._of_object if kind == "object" else self._of_plate
        return turned_size(quaternion_to_matrix(ask(lambda actor: actor.pose.q)), unturned)

    def evaluate(self) -> dict[str, Tensor]:
        """Judge the present state; a control step is counted once."""
        progress = self.progress
        new = self.elapsed_steps.to(self.device) != progress.step
        self._jump(new & (progress.step == JUMP_STEP - 1))
        progress.count(new, self._of_object(self.agent.is_grasping))
        # Before an episode's first step the simulation may have the contacts of the last one.
        success = self._on_plate() & (progress.step > 0)
        return {"success": success, "level": progress.level(success)}

    def _on_plate(self) -> Tensor:
        offset = self._of_object(lambda actor: actor.pose.p) - self._of_plate(
            lambda actor: actor.pose.p
        )
        return on_plate(offset, self.object_size, self.plate_size, self._between())

    def _jump(self, due: Tensor) -> None:
        """Move the object of PositionChangeTo, unless the episodes are those of training."""
        if self.episodes.kind.layout != "position_change" or self.obj_set == TRAIN or not due.any():
            return
        for row in due.nonzero()[:, 0].tolist():
            episode = self.present[row]
            self.scene._reset_mask = torch.zeros_like(self.scene._reset_mask)
            self.scene._reset_mask[row] = True
            for i, actor in enumerate(self.objects):
                moved = sapien.Pose(self._places(episode)[2], turned(episode.turn))
                self._put(actor, [moved if i == episode.object else _parked(1.0, i)])
        self.scene._reset_mask = torch.ones_like(self.scene._reset_mask)
        if self.gpu_sim_enabled:
            self.scene._gpu_apply_all()
            self.scene._gpu_fetch_all()

    def compute_dense_reward(self, obs: Any, action: Tensor, info: dict[str, Tensor]) -> Tensor:
        return info["level"]

    compute_normalized_dense_reward = compute_dense_reward

    @property
    def instructions(self) -> list[str]:
        """All that the task's episodes have."""
        return scene25_assets.instructions(self.assets, self.episodes)

    def get_language_instruction(self) -> list[str]:
        return [self._instruction(episode) for episode in self.present]

    def _instruction(self, episode: Scene25Episode) -> str:
        wording = WORDINGS[episode.extra] if self.episodes.kind.extra == "wording" else WORDINGS[0]
        return wording.format(
            object=self.assets.objects[episode.object].name,
            plate=self.assets.plates[episode.plate].name,
        )

    def _get_obs_sensor_data(self, apply_texture_transforms: bool = True) -> dict[str, Any]:
        data: dict[str, Any] = super()._get_obs_sensor_data(apply_texture_transforms)
        images = data[CAMERA]
        rendered = images["rgb"]
        segmentation = images["segmentation"][..., 0]
        foreground = torch.isin(segmentation, self._foreground.to(segmentation.device))
        tables = torch.tensor([episode.table for episode in self.present])
        picture = scene25_pictures.before_photographs(
            rendered, foreground, self._photographs[tables].to(rendered.device)
        )
        if self._textures is not None:
            disturb = scene25_pictures.with_window if self.whole else scene25_pictures.with_texture
            numbers = [
                episode.extra if self.version == "rl4vla" else episode.table
                for episode in self.present
            ]
            shares = [self.strength * self.assets.tables[number].mix for number in numbers]
            textures = self._textures[numbers].to(rendered.device)
            picture = torch.stack(
                [disturb(*row) for row in zip(picture, foreground, textures, shares, strict=True)]
            )
        images["rgb"] = picture
        return data


def _parked(x: float, index: int) -> sapien.Pose:
    return sapien.Pose([x, 0.3 * index, 1.0], FACING)

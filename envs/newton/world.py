"""Run copies of a scene in Newton, each with its own MuJoCo. The only user of Newton's API."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import newton
import numpy as np
import torch
import warp
from newton.sensors import SensorCamera
from newton.solvers import SolverMuJoCo
from numpy.typing import NDArray
from torch import Tensor

from ..genesis import rotations
from ..genesis.arm import joint_targets, pose_error
from ..genesis.batch import (
    ARM,
    CONTROL_HZ,
    DAMPING,
    FINGERS,
    POINTING_DOWN,
    POSTURE_RAD,
    STIFFNESS,
    TOOL_OFFSET_M,
    Views,
)
from ..genesis.predicates import Shapes, State
from ..genesis.scene import Box, Camera, Cylinder, Layout, Scene, SceneObject

wp: Any = warp
"""Warp's annotations refuse NumPy's arrays, which its functions take."""
PANDA = Path(__file__).with_name("panda.xml")
SUBSTEPS = 10
PHYSICS_DT_S = 1 / (CONTROL_HZ * SUBSTEPS)
CONTACT_KE, CONTACT_KD = 1e4, 200.0
"""Contacts with a time constant of 2 / KD = 0.01 s, critically damped: two physics steps,
the shortest that MuJoCo allows. With twice both times the fingers sank 1 cm into a cube."""
SEARCH_STEPS = 40
FINGER_FRICTION = 1.0
JOINTS = 9
LINKS = 11
"""Bodies of the robot: base, seven links, hand, two fingers."""
HAND = 8


class World:
    """Copies of a scene. Tensors are float32 on the CPU, in metres in the robot base frame."""

    def __init__(self, scene: Scene, num_envs: int, views: Views) -> None:
        """views: name -> camera and (height, width)."""
        wp.config.quiet = True
        self.device = torch.device("cpu")
        self.num_envs = num_envs
        self._model = _model(scene)
        self._solvers = [
            SolverMuJoCo(
                self._model,
                use_mujoco_cpu=True,
                cone="elliptic",
                impratio=10.0,
                enable_multiccd=True,
            )
            for _ in range(num_envs)
        ]
        self._states = [self._model.state() for _ in range(num_envs)]
        self._control = self._model.control()
        self._next = self._model.state()
        self._targets = self._control.joint_target_q.numpy()
        self._shapes = Shapes.of(scene, self.device)
        self._target = torch.zeros(num_envs, dtype=torch.int64)
        limits = (
            self._model.joint_limit_lower.numpy()[ARM],
            self._model.joint_limit_upper.numpy()[ARM],
        )
        self._limits = torch.from_numpy(limits[0]), torch.from_numpy(limits[1])
        self._views = {name: _View(*view) for name, view in views.items()}
        self._sensor = SensorCamera(self._model)
        self._sensor.create_default_light(enable_shadows=False)
        self._home = self._posture(scene.robot.tool_m)

    def reset(self, rows: list[int], layouts: list[Layout]) -> None:
        """Reset ``rows`` to the start of episodes, including contacts and targets."""
        for row, layout in zip(rows, layouts, strict=True):
            self._target[row] = layout.target
            joints = self._model.joint_q.numpy().copy()
            joints[:JOINTS] = self._home
            joints[ARM] += layout.jitter.astype(np.float32)
            for index, (centre, yaw) in enumerate(zip(layout.centre, layout.yaw, strict=True)):
                pose = [
                    *centre,
                    0.0,
                    0.0,
                    math.sin(yaw / 2),
                    math.cos(yaw / 2),
                ]  # Newton's quaternions are x y z w
                joints[JOINTS + 7 * index : JOINTS + 7 * index + 7] = pose
            self._solvers[row].reset(self._states[row])
            self._place(self._states[row], joints)

    def read(self) -> State:
        """Read the present state."""
        joints = torch.from_numpy(
            np.stack([state.joint_q.numpy()[:JOINTS] for state in self._states])
        )
        speeds = torch.from_numpy(
            np.stack([state.joint_qd.numpy()[FINGERS] for state in self._states])
        )
        self._poses = torch.from_numpy(np.stack([state.body_q.numpy() for state in self._states]))
        velocities = torch.from_numpy(
            np.stack([state.body_qd.numpy()[LINKS:, :3] for state in self._states])
        )
        quaternions = self._poses[..., [6, 3, 4, 5]]
        self._axes = rotations.third_axes(quaternions)
        return State(
            joints=joints,
            tool=self._poses[:, HAND, :3] + TOOL_OFFSET_M * self._axes[:, HAND, 0],
            tool_quaternion=quaternions[:, HAND],
            finger=joints[:, FINGERS].mean(1),
            finger_speed=speeds.mean(1),
            centre=self._poses[:, LINKS:, :3],
            quaternion=quaternions[:, LINKS:],
            up=self._axes[:, LINKS:, 1],
            speed=velocities.square().sum(-1).sqrt(),
            target=self._target,
            shapes=self._shapes,
        )

    def towards(self, position: Tensor, quaternion: Tensor, now: State, targets: Tensor) -> Tensor:
        """Arm joint targets ``[N, 7]`` after ``targets`` that bring the tool towards a pose."""
        anchors = self._poses[:, 1:HAND, :3]
        axes = self._axes[:, 1:HAND, 0]
        error = pose_error(position, quaternion, now.tool, now.tool_quaternion)
        return joint_targets(anchors, axes, now.tool, error, now.joints[:, ARM], targets).clamp(
            *self._limits
        )

    def step(self, joints: Tensor) -> None:
        """Run one control step towards joint targets ``joints`` ``[N, 9]``."""
        for row, solver in enumerate(self._solvers):
            self._targets[:JOINTS] = joints[row].numpy()
            self._control.joint_target_q.assign(self._targets)
            for _ in range(SUBSTEPS):
                solver.step(self._states[row], self._next, self._control, None, PHYSICS_DT_S)
                self._states[row], self._next = self._next, self._states[row]

    def image(self, camera: str, row: int) -> NDArray[np.uint8]:
        """Image of environment ``row``: uint8 ``[H, W, 3]``."""
        view, state = self._views[camera], self._states[row]
        height, width = view.size
        colours: Any = self._sensor.allocate_image_color(1, width, height)
        self._model.bvh_refit_shapes(state)
        self._sensor.update(state, view.pose, view.rays, color_image=colours)
        image: NDArray[np.uint8] = colours.numpy().view(np.uint8).reshape(height, width, 4)[..., :3]
        return image

    def close(self) -> None:
        """Nothing is held outside this process."""

    def _place(self, state: Any, joints: NDArray[np.float32]) -> None:
        state.joint_q.assign(joints)
        state.joint_qd.zero_()
        newton.eval_fk(self._model, state.joint_q, state.joint_qd, state)

    def _posture(self, tool: tuple[float, ...]) -> NDArray[np.float32]:
        """Joint angles ``[9]`` with the tool at ``tool``, pointing down."""
        joints = self._model.joint_q.numpy().copy()
        joints[:JOINTS] = POSTURE_RAD
        position, down = torch.tensor([tool]), torch.tensor([POINTING_DOWN])
        for _ in range(SEARCH_STEPS):
            for state in self._states:
                self._place(state, joints)
            now = self.read()
            joints[ARM] = self.towards(position, down, now, now.joints[:, ARM])[0].numpy()
        angles: NDArray[np.float32] = joints[:JOINTS].copy()
        return angles


class _View:
    """A fixed camera: its pose and rays for the sensor, which looks along -z, with y up."""

    def __init__(self, camera: Camera, size: tuple[int, int]) -> None:
        self.size = size
        eye, target = np.array(camera.eye_m), np.array(camera.target_m)
        back = (eye - target) / np.linalg.norm(eye - target)
        side = np.cross([0.0, 0.0, 1.0], back)
        if np.linalg.norm(side) < 1e-6:  # straight down: the image's top is forward
            side = np.array([0.0, -1.0, 0.0])
        side /= np.linalg.norm(side)
        axes = np.stack([side, np.cross(back, side), back], axis=1)
        quaternion = wp.quat_from_matrix(wp.mat33f(axes.astype(np.float32).reshape(9)))
        self.pose = wp.array([wp.transformf(wp.vec3f(*eye), quaternion)], dtype=wp.transformf)
        self.rays = SensorCamera.compute_camera_rays_pinhole(
            size[1], size[0], camera_fov=math.radians(camera.fov_deg)
        )


def _model(scene: Scene) -> Any:
    """Newton's model of the robot, the objects and the table, in one world."""
    builder: Any = newton.ModelBuilder()
    SolverMuJoCo.register_custom_attributes(builder)
    builder.begin_world()
    builder.add_mjcf(str(PANDA), enable_self_collisions=False, floating=False)
    builder.joint_target_mode[:JOINTS] = [newton.JointTargetMode.POSITION] * JOINTS
    builder.joint_target_ke[:JOINTS], builder.joint_target_kd[:JOINTS] = STIFFNESS, DAMPING
    for thing in scene.things.values():
        _add(builder, thing)
    builder.end_world()
    builder.add_ground_plane(color=(0.62, 0.6, 0.57))
    shapes = builder.shape_count
    builder.shape_material_ke[:] = [CONTACT_KE] * shapes
    builder.shape_material_kd[:] = [CONTACT_KD] * shapes
    return builder.finalize(device="cpu")


def _add(builder: Any, thing: SceneObject) -> None:
    """Add an object. A fixed one is kinematic, because episodes place it too."""
    shape = thing.shape
    body = builder.add_body(is_kinematic=thing.fixed)
    volume = 8 * float(np.prod(thing.half_m))
    if isinstance(shape, Cylinder):
        volume *= math.pi / 4
    elif not isinstance(shape, Box):
        volume *= math.pi / 6
    config = builder.ShapeConfig(
        density=thing.mass_kg / volume, mu=FINGER_FRICTION, has_shape_collision=thing.collision
    )
    half = [float(length) for length in thing.half_m]
    if isinstance(shape, Box):
        builder.add_shape_box(
            body, hx=half[0], hy=half[1], hz=half[2], cfg=config, color=thing.colour[:3]
        )
    elif isinstance(shape, Cylinder):
        builder.add_shape_cylinder(
            body, radius=half[0], half_height=half[2], cfg=config, color=thing.colour[:3]
        )
    else:
        builder.add_shape_sphere(body, radius=half[0], cfg=config, color=thing.colour[:3])

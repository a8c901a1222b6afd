"""Run ``N`` copies of a scene in Genesis. The only module that uses the Genesis API."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import rotations
from .arm import joint_targets, pose_error
from .batch import (
    ARM,
    DAMPING,
    FINGERS,
    PHYSICS_DT_S,
    POINTING_DOWN,
    POSTURE_RAD,
    STIFFNESS,
    SUBSTEPS,
    TOOL_OFFSET_M,
)
from .predicates import Shapes, State, asks_for_rest
from .scene import Box, Camera, Cylinder, Layout, Mesh, Scene, SceneObject, Sphere

PANDA = "xml/franka_emika_panda/panda.xml"
"""Path in Genesis' own assets (from MuJoCo Menagerie)."""
FORCE_LIMIT = (87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0, 20.0, 20.0)
"""Limits of a Panda: Nm, and N for the fingers."""
ROBOT_COLOUR = (0.86, 0.86, 0.84, 1.0)


@cache
def start(backend: str) -> Any:
    """Initialise Genesis and return its module. Once per process, because its state is global."""
    import genesis

    genesis.init(backend=getattr(genesis, backend), precision="32", logging_level="warning", seed=0)
    return genesis


class World:
    """Copies of a scene. Tensors are float32 on ``device``, in metres in the robot base frame."""

    def __init__(
        self,
        scene: Scene,
        num_envs: int,
        backend: str,
        cameras: dict[str, tuple[Camera, tuple[int, int]]],
        low_poly: bool,
    ) -> None:
        """cameras: name -> camera and (height, width)."""
        gs = start(backend)
        self.device = torch.device(gs.device)
        self.num_envs = num_envs
        # One environment is rendered at a time, so that no image depends on the others.
        self._scene, self._robot, self._things = assemble(
            gs, scene, low_poly, SUBSTEPS, rendered_envs_idx=(0,)
        )
        self._cameras = {
            name: add_camera(self._scene, camera, size, env_idx=0)
            for name, (camera, size) in cameras.items()
        }
        build(self._scene, self._robot, num_envs)
        low, high = self._robot.get_dofs_limit()
        self._limits = low[..., ARM], high[..., ARM]
        first = self._robot.get_joint("joint1").idx
        self._arm_joints = slice(first, first + 7)
        self._hand = self._robot.get_link("hand")
        last = self._things[
            -1
        ].base_link_idx  # each object is one link; their links follow the robot's
        self._links = slice(self._hand.idx, last + 1)
        self._own = slice(last + 1 - len(self._things) - self._hand.idx, None)
        """Slice of the objects among those links; the first link is the hand."""
        middles = [
            thing.shape.middle_m if isinstance(thing.shape, Mesh) else (0.0, 0.0, 0.0)
            for thing in scene.things.values()
        ]
        self._middle = torch.tensor([middles], device=self.device)
        """``[1, K, 3]``: centre of each object in its own frame."""
        self._off_centre = bool(self._middle.any())
        self._shapes = Shapes.of(scene, self.device)
        self._rest_matters = asks_for_rest(scene)
        self._target = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._still = torch.zeros(num_envs, len(scene.things), device=self.device)
        hand = torch.tensor(scene.robot.tool_m, device=self.device) + torch.tensor(
            [0.0, 0.0, TOOL_OFFSET_M], device=self.device
        )
        down, posture = (
            torch.tensor(values, device=self.device) for values in (POINTING_DOWN, POSTURE_RAD)
        )
        # One initial guess and no random restarts, so that the solution is deterministic.
        self._home = self._robot.inverse_kinematics(
            link=self._hand,
            pos=hand.expand(num_envs, 3),
            quat=down.expand(num_envs, 4),
            init_qpos=posture.expand(num_envs, 9),
            max_samples=1,
        ).clone()
        self._home[:, FINGERS] = POSTURE_RAD[-1]

    def reset(self, rows: list[int], layouts: list[Layout]) -> None:
        """Reset ``rows`` to the start of episodes, including contacts and targets."""
        self._scene.reset(envs_idx=rows)
        self._target[rows] = torch.tensor([layout.target for layout in layouts], device=self.device)
        joints = self._home[rows]
        joints[:, ARM] += self._tensor(np.stack([layout.jitter for layout in layouts]))
        self._robot.set_qpos(joints, envs_idx=rows)
        for index, thing in enumerate(self._things):
            centre = self._tensor(np.stack([layout.centre[index] for layout in layouts]))
            half_yaw = self._tensor(np.stack([layout.yaw[index] / 2 for layout in layouts]))
            zero = torch.zeros_like(half_yaw)
            quaternion = torch.stack([torch.cos(half_yaw), zero, zero, torch.sin(half_yaw)], dim=1)
            thing.set_pos(
                centre - rotations.turned(quaternion, self._middle[:, index]), envs_idx=rows
            )
            thing.set_quat(quaternion, envs_idx=rows)

    def read(self) -> State:
        """Read the present state."""
        solver = self._scene.rigid_solver
        places = solver.get_links_pos(self._links, relative=True)
        quaternions = solver.get_links_quat(self._links, relative=True)
        axes = rotations.third_axes(quaternions)
        centre, quaternion = places[:, self._own], quaternions[:, self._own]
        if self._off_centre:
            centre = centre + rotations.turned(quaternion, self._middle)
        joints = self._robot.get_qpos().clone()
        return State(
            joints=joints,
            tool=places[:, 0] + TOOL_OFFSET_M * axes[:, 0, 0],
            tool_quaternion=quaternions[:, 0],
            finger=joints[:, FINGERS].mean(1),
            finger_speed=self._robot.get_dofs_velocity()[:, FINGERS].mean(1),
            centre=centre,
            quaternion=quaternion,
            up=axes[:, self._own, 1],
            speed=solver.get_links_vel(self._links)[:, self._own].square().sum(-1).sqrt()
            if self._rest_matters
            else self._still,
            target=self._target,
            shapes=self._shapes,
        )

    def towards(self, position: Tensor, quaternion: Tensor, now: State, targets: Tensor) -> Tensor:
        """Arm joint targets ``[N, 7]`` after ``targets`` that bring the tool towards a pose."""
        solver = self._scene.rigid_solver
        anchors = solver.get_joints_anchor_pos(self._arm_joints)
        axes = solver.get_joints_anchor_axis(self._arm_joints)
        error = pose_error(position, quaternion, now.tool, now.tool_quaternion)
        return joint_targets(anchors, axes, now.tool, error, now.joints[:, ARM], targets).clamp(
            *self._limits
        )

    def step(self, joints: Tensor) -> None:
        """Run one control step towards joint targets ``joints`` ``[N, 9]``."""
        self._robot.control_dofs_position(joints)
        self._scene.step(update_visualizer=False)

    def image(self, camera: str, row: int) -> NDArray[np.uint8]:
        """Image of environment ``row``: uint8 ``[H, W, 3]``."""
        self._scene.visualizer.context.rendered_envs_idx = [row]
        image: NDArray[np.uint8] = self._cameras[camera].render(force_render=True)[0]
        return image

    def close(self) -> None:
        self._scene.destroy()

    def _tensor(self, array: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(array.astype(np.float32)).to(self.device)


def assemble(
    gs: Any, scene: Scene, low_poly: bool, substeps: int, **looks: Any
) -> tuple[Any, Any, list[Any]]:
    """Make Genesis' scene, its robot and its objects, not yet built.

    substeps: physics steps per ``step``. looks: arguments of Genesis' VisOptions.
    """
    simulation = gs.Scene(
        sim_options=gs.options.SimOptions(dt=substeps * PHYSICS_DT_S, substeps=substeps),
        vis_options=gs.options.VisOptions(shadow=False, ambient_light=(0.35, 0.35, 0.35), **looks),
        show_viewer=False,
    )
    simulation.add_entity(gs.morphs.Plane(), surface=gs.surfaces.Default(color=(0.62, 0.6, 0.57)))
    robot = simulation.add_entity(
        gs.morphs.MJCF(file=PANDA),
        material=gs.materials.Rigid(gravity_compensation=1.0),
        vis_mode="collision" if low_poly else "visual",
    )
    if low_poly:
        for geom in robot.geoms:
            geom.mesh.set_color(ROBOT_COLOUR)  # Genesis gives collision meshes random colours
    return simulation, robot, [_add(gs, simulation, thing) for thing in scene.things.values()]


def add_camera(scene: Any, camera: Camera, size: tuple[int, int], **whose: Any) -> Any:
    """Add a camera; ``size`` is (height, width)."""
    return scene.add_camera(
        res=(size[1], size[0]),
        pos=camera.eye_m,
        lookat=camera.target_m,
        fov=camera.fov_deg,
        near=0.02,
        **whose,
    )


def build(scene: Any, robot: Any, num_envs: int) -> None:
    scene.build(n_envs=num_envs)
    robot.set_dofs_kp(STIFFNESS)
    robot.set_dofs_kv(DAMPING)
    robot.set_dofs_force_range([-force for force in FORCE_LIMIT], FORCE_LIMIT)


def _add(gs: Any, scene: Any, thing: SceneObject) -> Any:
    shape = thing.shape
    options: dict[str, Any] = {
        "fixed": thing.fixed,
        "collision": thing.collision,
        "batch_fixed_verts": True,
    }
    if isinstance(shape, Box):
        morph = gs.morphs.Box(size=shape.size_m, **options)
        volume = float(np.prod(shape.size_m))
    elif isinstance(shape, Sphere):
        morph = gs.morphs.Sphere(radius=shape.radius_m, **options)
        volume = 4 / 3 * np.pi * shape.radius_m**3
    elif isinstance(shape, Cylinder):
        morph = gs.morphs.Cylinder(radius=shape.radius_m, height=shape.height_m, **options)
        volume = np.pi * shape.radius_m**2 * shape.height_m
    else:
        morph = gs.morphs.Mesh(file=shape.file, scale=shape.scale, **options)
        volume = shape.volume_m3
    material = gs.materials.Rigid(rho=thing.mass_kg / volume)
    return scene.add_entity(
        morph, material=material, surface=gs.surfaces.Default(color=thing.colour)
    )

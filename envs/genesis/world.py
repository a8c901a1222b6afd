"""A scene in Genesis: ``N`` copies of the robot and its objects, stepped together, seen one by one. The only module that knows Genesis."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import rotations
from .scene import Box, Camera, Cylinder, Layout, Mesh, Scene, Sphere, Thing

PHYSICS_DT_S = 0.01
TOOL_OFFSET_M = (0.0, 0.0, 0.1034)
"""Of the point between a Panda's fingertips from the frame of its hand."""
POINTING_DOWN = (0.0, 1.0, 0.0, 0.0)
PANDA = "xml/franka_emika_panda/panda.xml"
"""In Genesis' own assets (MuJoCo Menagerie)."""
POSTURE_RAD = (0.0, 0.1, 0.0, -2.3, 0.0, 2.4, 0.785, 0.04, 0.04)
"""Joints from which the posture at ``Robot.tool_m`` is found: elbow up. The last two are the fingers, metres."""
STIFFNESS = (4500.0, 4500.0, 3500.0, 3500.0, 2000.0, 2000.0, 2000.0, 1000.0, 1000.0)
DAMPING = (150.0, 150.0, 120.0, 120.0, 45.0, 45.0, 45.0, 50.0, 50.0)
"""Nearly critical, less than Genesis' examples take: the arm follows its target within about one control step."""
FORCE_LIMIT = (87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0, 20.0, 20.0)
"""Nm, and N for the fingers: a Panda's."""
ROBOT_COLOUR = (0.86, 0.86, 0.84, 1.0)
ARM, FINGERS = slice(0, 7), slice(7, 9)


@cache
def start(backend: str) -> Any:
    """Genesis, initialised: once per process, because it is global."""
    import genesis

    genesis.init(backend=getattr(genesis, backend), precision="32", logging_level="warning", seed=0)
    return genesis


class World:
    """All tensors are float32 on ``device``; positions in metres, in the frame of the robot's base."""

    def __init__(
        self, scene: Scene, num_envs: int, backend: str, cameras: dict[str, tuple[Camera, tuple[int, int]]], low_poly: bool
    ) -> None:
        """cameras: name -> camera and (height, width)."""
        gs = start(backend)
        self.device, self.num_envs = torch.device(gs.device), num_envs
        self._scene = gs.Scene(
            sim_options=gs.options.SimOptions(dt=PHYSICS_DT_S),
            # One environment is drawn at a time, whichever is asked for; so no image can depend on the others.
            vis_options=gs.options.VisOptions(rendered_envs_idx=(0,), shadow=False, ambient_light=(0.35, 0.35, 0.35)),
            show_viewer=False,
        )
        self._scene.add_entity(gs.morphs.Plane(), surface=gs.surfaces.Default(color=(0.62, 0.6, 0.57)))
        self._robot = self._scene.add_entity(
            gs.morphs.MJCF(file=PANDA),
            material=gs.materials.Rigid(gravity_compensation=1.0),
            vis_mode="collision" if low_poly else "visual",
        )
        if low_poly:
            for geom in self._robot.geoms:
                geom.mesh.set_color(ROBOT_COLOUR)  # Genesis draws collision meshes in random colours
        self._things = [_add(gs, self._scene, thing) for thing in scene.things.values()]
        self._cameras = {
            name: self._scene.add_camera(
                res=(width, height), pos=camera.eye_m, lookat=camera.target_m, fov=camera.fov_deg, near=0.02, env_idx=0
            )
            for name, (camera, (height, width)) in cameras.items()
        }
        self._scene.build(n_envs=num_envs)
        self._robot.set_dofs_kp(STIFFNESS)
        self._robot.set_dofs_kv(DAMPING)
        self._robot.set_dofs_force_range([-force for force in FORCE_LIMIT], FORCE_LIMIT)
        self._hand = self._robot.get_link("hand")
        self._offset = torch.tensor([TOOL_OFFSET_M], device=self.device)
        self._links = [thing.base_link_idx for thing in self._things]
        middles = [thing.shape.middle_m if isinstance(thing.shape, Mesh) else (0.0, 0.0, 0.0) for thing in scene.things.values()]
        self._middle = torch.tensor([middles], device=self.device)
        """``[1, K, 3]``: of each object in its own frame."""
        tool = torch.tensor([scene.robot.tool_m], device=self.device).expand(num_envs, 3)
        down = torch.tensor([POINTING_DOWN], device=self.device).expand(num_envs, 4)
        self._home = self.joints_for(tool, down, torch.tensor([POSTURE_RAD], device=self.device).expand(num_envs, 9))
        self._home[:, FINGERS] = POSTURE_RAD[-1]

    def reset(self, rows: list[int], layouts: list[Layout]) -> None:
        """Put ``rows`` at the start of episodes; what they remember of contacts and targets is forgotten."""
        self._scene.reset(envs_idx=rows)
        joints = self._home[rows]
        joints[:, ARM] += self._tensor(np.stack([layout.jitter for layout in layouts]))
        self._robot.set_qpos(joints, envs_idx=rows)
        for index, thing in enumerate(self._things):
            centre = self._tensor(np.stack([layout.centre[index] for layout in layouts]))
            half_yaw = self._tensor(np.stack([layout.yaw[index] / 2 for layout in layouts]))
            zero = torch.zeros_like(half_yaw)
            quaternion = torch.stack([torch.cos(half_yaw), zero, zero, torch.sin(half_yaw)], dim=1)
            thing.set_pos(centre - rotations.turned(quaternion, self._middle[:, index]), envs_idx=rows)
            thing.set_quat(quaternion, envs_idx=rows)

    def joints(self) -> Tensor:
        """``[N, 9]``: of the arm (rad) and the fingers (m)."""
        joints: Tensor = self._robot.get_qpos().clone()
        return joints

    def joint_speeds(self) -> Tensor:
        """``[N, 9]`` rad/s and m/s."""
        speeds: Tensor = self._robot.get_dofs_velocity().clone()
        return speeds

    def tool(self) -> tuple[Tensor, Tensor]:
        """Tool centre point ``[N, 3]`` and quaternion ``[N, 4]`` (w x y z)."""
        quaternion = self._hand.get_quat().clone()
        return self._hand.get_pos() + rotations.turned(quaternion, self._offset), quaternion

    def things(self) -> tuple[Tensor, Tensor, Tensor]:
        """Centres ``[N, K, 3]``, quaternions ``[N, K, 4]`` and speeds ``[N, K]`` (m/s) of the objects."""
        solver = self._scene.rigid_solver
        quaternion = solver.get_links_quat(self._links, relative=True).clone()
        centre = solver.get_links_pos(self._links, relative=True) + rotations.turned(quaternion, self._middle)
        return centre, quaternion, solver.get_links_vel(self._links).square().sum(-1).sqrt()

    def joints_for(self, position: Tensor, quaternion: Tensor, near: Tensor) -> Tensor:
        """``[N, 9]``: joints that bring the tool to a pose, or as close as they can, found from the joints ``near``. Nothing moves.

        One start and no random restarts, so that the solution neither jumps nor depends on chance.
        """
        found: Tensor = self._robot.inverse_kinematics(
            link=self._hand,
            pos=position - rotations.turned(quaternion, self._offset),
            quat=quaternion,
            init_qpos=near,
            max_samples=1,
        )
        return found.clone()

    def step(self, joints: Tensor, times: int) -> None:
        """``times`` physics steps towards ``joints`` ``[N, 9]``."""
        self._robot.control_dofs_position(joints)
        for _ in range(times):
            self._scene.step(update_visualizer=False)

    def image(self, camera: str, row: int) -> NDArray[np.uint8]:
        """``[H, W, 3]``"""
        self._scene.visualizer.context.rendered_envs_idx = [row]
        image: NDArray[np.uint8] = self._cameras[camera].render(force_render=True)[0]
        return image

    def close(self) -> None:
        self._scene.destroy()

    def _tensor(self, array: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(array.astype(np.float32)).to(self.device)


def _add(gs: Any, scene: Any, thing: Thing) -> Any:
    shape = thing.shape
    options: dict[str, Any] = {"fixed": thing.fixed, "collision": thing.collision, "batch_fixed_verts": True}
    if isinstance(shape, Box):
        morph, volume = gs.morphs.Box(size=shape.size_m, **options), float(np.prod(shape.size_m))
    elif isinstance(shape, Sphere):
        morph, volume = gs.morphs.Sphere(radius=shape.radius_m, **options), 4 / 3 * np.pi * shape.radius_m**3
    elif isinstance(shape, Cylinder):
        morph, volume = (
            gs.morphs.Cylinder(radius=shape.radius_m, height=shape.height_m, **options),
            np.pi * shape.radius_m**2 * shape.height_m,
        )
    else:
        morph, volume = gs.morphs.Mesh(file=shape.file, scale=shape.scale, **options), shape.volume_m3
    material = gs.materials.Rigid(rho=thing.mass_kg / volume)
    return scene.add_entity(morph, material=material, surface=gs.surfaces.Default(color=thing.colour))

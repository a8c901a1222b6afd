"""Batch of environments of one scene: actions, proprioception, images, rewards, experts."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError

from ..shared_arrays import SimulatorSpec
from . import predicates, rotations
from .arm import ROTATION_RAD, TRANSLATION_M
from .experts import expert_actions
from .loading import scene_from
from .scene import Camera, draw
from .world import ARM, FINGERS, PHYSICS_DT_S, POINTING_DOWN, SUBSTEPS, World

CONTROL_HZ = 1 / (SUBSTEPS * PHYSICS_DT_S)
LEASH_M, LEASH_RAD = 0.08, 0.5
"""Largest lead of the target over the tool, so that a blocked arm does not wind up."""
FINGER_OPEN_M, FINGER_CLOSED_M = 0.04, -0.01
"""Finger targets for actions +1 and -1; the latter is beyond closed, so that it presses."""
PICTURE_SIZE = 256


class GenesisBatch:
    """Implements ``Batch``. ``options``: JSON values made by ``plugin.simulator_options``."""

    def __init__(self, options: dict[str, Any], num_envs: int, backend: str) -> None:
        self._options, self.scene = options, scene_from(options["scene"], Path(options["path"]))
        size, first = (options["image_size"],) * 2, next(iter(self.scene.cameras.values()))
        views: dict[str, tuple[Camera, tuple[int, int]]] = {name: (self.scene.cameras[name], size) for name in options["cameras"]}
        try:
            self._world = World(self.scene, num_envs, backend, views | {"": (first, (PICTURE_SIZE,) * 2)}, options["low_poly"])
        except ImportError as error:  # raised by the rendering libraries
            raise UserError(f"Genesis cannot render here ({str(error).splitlines()[0]}): apt-get install libegl1 libgl1") from error
        self.num_envs, self.device = num_envs, self._world.device
        versions = {name: version(name) for name in ("genesis-world", "torch", "numpy")}
        renderer = os.environ.get("PYOPENGL_PLATFORM") or "egl"  # Genesis sets it if it falls back to OSMesa
        visuals = "low_poly" if options["low_poly"] else "stock"
        self.spec = SimulatorSpec(
            action_dim=7 if options["rotations"] else 4,
            state_dim=8,
            control_hz=CONTROL_HZ,
            images={name: list(size) for name in views},
            picture=[PICTURE_SIZE] * 2,
            tool=[TRANSLATION_M, ROTATION_RAD * options["rotations"]],
            stack=versions | {"physics": backend, "renderer": renderer, "robot_visuals": visuals},
        )
        self._drawn = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._progress = torch.zeros(num_envs, device=self.device)
        self.now = self._world.read()
        """What the world was like after the last reset or control step."""
        self._position, self._quaternion = self.now.tool.clone(), self.now.tool_quaternion.clone()
        self._joints = self.now.joints.clone()
        """Joint targets."""
        self._shapes = predicates.Shapes.of(self.scene, self.device)
        self._rest_matters = predicates.asks_for_rest(self.scene)
        self._still = torch.zeros(num_envs, len(self.scene.things), device=self.device)

    def reset(self, seeds: list[int], rows: list[int]) -> list[str]:
        layouts = [draw(self.scene, seeds[row]) for row in rows]
        self._world.reset(rows, layouts)
        index = torch.tensor(rows, device=self.device)
        self._drawn[index] = torch.tensor([layout.target for layout in layouts], device=self.device)
        # The posture has jitter: hold the tool at its present position, but pointing down.
        self.now = self._world.read()
        self._position[index] = self.now.tool[index]
        self._quaternion[index] = self._quaternion.new_tensor(POINTING_DOWN)
        self._joints[index] = self.now.joints[index]
        self._progress[index] = predicates.progress(self.scene, self.state())[index]
        return [self.scene.told(target) for target in self._drawn.tolist()]

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        actions = actions.clamp(-1, 1)
        position, quaternion = self.now.tool, self.now.tool_quaternion
        ahead = self._position + TRANSLATION_M * actions[:, :3] - position
        self._position = position + rotations.limited(ahead, LEASH_M)
        if self._options["rotations"]:
            asked = rotations.product(rotations.from_vector(ROTATION_RAD * actions[:, 3:6]), self._quaternion)
            turn = rotations.to_vector(rotations.product(asked, rotations.conjugate(quaternion)))
            self._quaternion = rotations.product(rotations.from_vector(rotations.limited(turn, LEASH_RAD)), quaternion)
        arm = self._world.towards(self._position, self._quaternion, self.now, self._joints[:, ARM])
        opening = FINGER_CLOSED_M + (FINGER_OPEN_M - FINGER_CLOSED_M) * (actions[:, -1:] + 1) / 2
        self._joints = torch.cat([arm, opening, opening], dim=1)
        self._world.step(self._joints)
        self.now = self._world.read()
        state = self.state()
        success = predicates.success(self.scene, state)
        if self._options["reward"] == "sparse":
            return success.float(), success, success
        done = predicates.progress(self.scene, state)
        reward, self._progress = done - self._progress, done
        return reward, success, success

    def observe(self, rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        finger = self.now.joints[:, FINGERS].mean(1, keepdim=True)
        state = torch.cat([self.now.tool, self.now.tool_quaternion, finger], dim=1)[rows]
        return state, {name: torch.stack([self._image(name, row) for row in rows]).to(self.device) for name in self.spec.images}

    def expert(self) -> Tensor:
        action = expert_actions(self.scene, self.state())
        if not self._options["rotations"]:
            return action
        # Correct the commanded orientation; the tool's own lags, and correcting it would overshoot.
        back = rotations.product(self._quaternion.new_tensor(POINTING_DOWN), rotations.conjugate(self._quaternion))
        turn = (rotations.to_vector(back) / ROTATION_RAD).clamp(-1, 1)
        return torch.cat([action[:, :3], turn, action[:, 3:]], dim=1)

    def render(self, index: int) -> Tensor:
        return self._image("", index)

    def close(self) -> None:
        self._world.close()

    def _image(self, camera: str, row: int) -> Tensor:
        return torch.from_numpy(self._world.image(camera, row).copy())

    def state(self) -> predicates.State:
        """Return what predicates and the expert see of the present."""
        now = self.now
        return predicates.State(
            tool=now.tool,
            finger=now.joints[:, FINGERS].mean(1),
            finger_speed=now.joint_speeds[:, FINGERS].mean(1),
            centre=now.centre,
            quaternion=now.quaternion,
            up=now.up,
            speed=self._world.speeds() if self._rest_matters else self._still,
            target=self._drawn,
            shapes=self._shapes,
        )

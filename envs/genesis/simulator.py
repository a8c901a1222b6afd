"""Simulator process of Genesis: a batch of environments of one scene.

Actions, proprioception, images, rewards and the expert are those of ``GenesisBatch``, on the CPU or
a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError

from ..batch_serving import BatchServer
from ..serving import PICTURE_SIZE, serve
from ..shared_arrays import SimulatorSpec
from . import predicates, rotations
from .arm import ROTATION_RAD, TRANSLATION_M
from .experts import expert_actions
from .loading import scene_from
from .scene import Camera, draw
from .world import ARM, PHYSICS_DT_S, POINTING_DOWN, SUBSTEPS, World

CONTROL_HZ = 1 / (SUBSTEPS * PHYSICS_DT_S)
LEASH_M, LEASH_RAD = 0.08, 0.5
"""Largest lead of the target over the tool, so that a blocked arm does not wind up."""
FINGER_OPEN_M, FINGER_CLOSED_M = 0.04, -0.01
"""Finger targets for actions +1 and -1; the latter is beyond closed, so that it presses."""
SMALLEST_BATCH = 2
"""The environment is the last dimension of Genesis' tensors. With a single one the other dimensions
lie contiguous in memory, for which the same kernels give other last bits; all sizes from two on
agree. A single environment is therefore simulated beside one that nobody uses."""


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
        self._progress = torch.zeros(num_envs, device=self.device)
        self.now = self._world.read()
        """What the world was like after the last reset or control step."""
        self._position, self._quaternion = self.now.tool.clone(), self.now.tool_quaternion.clone()
        self._joints = self.now.joints.clone()
        """Joint targets."""

    def reset(self, seeds: list[int], rows: list[int]) -> list[str]:
        self._world.reset(rows, [draw(self.scene, seeds[row]) for row in rows])
        index = torch.tensor(rows, device=self.device)
        # The posture has jitter: hold the tool at its present position, but pointing down.
        self.now = self._world.read()
        self._position[index] = self.now.tool[index]
        self._quaternion[index] = self._quaternion.new_tensor(POINTING_DOWN)
        self._joints[index] = self.now.joints[index]
        self._progress[index] = predicates.progress(self.scene, self.now)[index]
        return [self.scene.told(target) for target in self.now.target.tolist()]

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
        success = predicates.success(self.scene, self.now)
        if self._options["reward"] == "sparse":
            return success.float(), success, success
        done = predicates.progress(self.scene, self.now)
        reward, self._progress = done - self._progress, done
        return reward, success, success

    def observe(self, rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        state = torch.cat([self.now.tool, self.now.tool_quaternion, self.now.finger[:, None]], dim=1)[rows]
        return state, {name: torch.stack([self._image(name, row) for row in rows]).to(self.device) for name in self.spec.images}

    def expert(self) -> Tensor:
        action = expert_actions(self.scene, self.now)
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


def create(options: dict[str, Any], slots: int) -> GenesisBatch:
    """Make a batch of at least ``slots`` environments and warm it up.

    So no later command waits for a kernel to load.
    """
    torch.set_num_threads(1)
    batch = GenesisBatch(options, max(slots, SMALLEST_BATCH), options["backend"])
    rows = list(range(batch.num_envs))
    for _ in range(2):
        batch.reset(rows, rows)
        batch.step(batch.expert())
        batch.observe(rows[:1])
        batch.render(0)
    return batch


def compile_kernels() -> None:
    """Compile and save the kernels of the job on standard input (JSON)."""
    import genesis

    job = json.load(sys.stdin)
    create(job["options"], job["num_envs"]).close()
    genesis.destroy()  # writes the kernels


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        compile_kernels()
    else:
        with torch.inference_mode():  # a control step is a hundred small operations, each a fifth cheaper without autograd
            serve(create, BatchServer)

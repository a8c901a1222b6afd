"""Batch of environments of one scene: actions, proprioception, images, rewards and the expert.

What simulates is behind ``SceneWorld``: Genesis here, Newton in ``envs.newton``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..serving import PICTURE_SIZE
from ..shared_arrays import SimulatorSpec
from . import predicates, rotations
from .arm import ROTATION_RAD, TRANSLATION_M
from .experts import expert_actions
from .loading import scene_from
from .predicates import State
from .scene import Camera, Layout, Scene, draw

PHYSICS_DT_S = 0.01
SUBSTEPS = 5
"""Physics steps per control step."""
CONTROL_HZ = 1 / (SUBSTEPS * PHYSICS_DT_S)
TOOL_OFFSET_M = 0.1034
"""Offset of the point between the fingertips from the hand, along the hand's third axis."""
POINTING_DOWN = (0.0, 1.0, 0.0, 0.0)
ARM, FINGERS = slice(0, 7), slice(7, 9)
POSTURE_RAD = (0.0, 0.1, 0.0, -2.3, 0.0, 2.4, 0.785, 0.04, 0.04)
"""Initial guess for the posture at ``Robot.tool_m``: elbow up. The last two are fingers (m)."""
STIFFNESS = (4500.0, 4500.0, 3500.0, 3500.0, 2000.0, 2000.0, 2000.0, 1000.0, 1000.0)
DAMPING = (150.0, 150.0, 120.0, 120.0, 45.0, 45.0, 45.0, 50.0, 50.0)
"""Nearly critical, less than in Genesis' examples: the arm lags by about one control step."""
LEASH_M, LEASH_RAD = 0.08, 0.5
"""Largest lead of the target over the tool, so that a blocked arm does not wind up."""
FINGER_OPEN_M = 0.04
FINGER_CLOSED_M = -0.01
"""Finger targets for actions +1 and -1; the latter is beyond closed, so that it presses."""

Views = dict[str, tuple[Camera, tuple[int, int]]]
"""Camera name -> camera and (height, width); the name "" is that of ``render``."""


class SceneWorld(Protocol):
    """``N`` copies of a scene with a Panda. Tensors are float32 on ``device``, in metres."""

    device: torch.device
    num_envs: int

    def reset(self, rows: list[int], layouts: list[Layout]) -> None:
        """Reset ``rows`` to the start of episodes, including contacts and targets."""

    def read(self) -> State:
        """Read the present state."""

    def towards(self, position: Tensor, quaternion: Tensor, now: State, targets: Tensor) -> Tensor:
        """Arm joint targets ``[N, 7]`` after ``targets`` that bring the tool towards a pose."""

    def step(self, joints: Tensor) -> None:
        """Run one control step towards joint targets ``joints`` ``[N, 9]``."""

    def image(self, camera: str, row: int) -> NDArray[np.uint8]:
        """Image of environment ``row``: uint8 ``[H, W, 3]``."""

    def close(self) -> None: ...


def scene_and_views(options: dict[str, Any]) -> tuple[Scene, Views]:
    """The scene of a simulator's ``options`` and its views."""
    scene = scene_from(options["scene"], Path(options["path"]))
    size = (options["image_size"],) * 2
    first = next(iter(scene.cameras.values()))
    return scene, {name: (scene.cameras[name], size) for name in options["cameras"]} | {
        "": (first, (PICTURE_SIZE,) * 2)
    }


def outline(options: dict[str, Any]) -> SimulatorSpec:
    """Return the spec of a ``SceneBatch`` with these options, but for its stack."""
    return SimulatorSpec(
        action_dim=7 if options["rotations"] else 4,
        state_dim=8,
        control_hz=CONTROL_HZ,
        images={name: [options["image_size"]] * 2 for name in options["cameras"]},
        picture=[PICTURE_SIZE] * 2,
        tool=[TRANSLATION_M, ROTATION_RAD * options["rotations"]],
    )


class SceneBatch:
    """Implements ``Batch``. ``options``: JSON values by the plug-in's ``simulator_options``."""

    def __init__(
        self, options: dict[str, Any], scene: Scene, world: SceneWorld, stack: dict[str, str]
    ) -> None:
        self._options = options
        self.scene = scene
        self._world = world
        self.num_envs = world.num_envs
        self.device = world.device
        self.spec = replace(outline(options), stack=stack)
        self._progress = torch.zeros(self.num_envs, device=self.device)
        self.now = self._world.read()
        """What the world was like after the last reset or control step."""
        self._position = self.now.tool.clone()
        self._quaternion = self.now.tool_quaternion.clone()
        self._joints = self.now.joints.clone()
        """Joint targets."""

    def warm_up(self) -> None:
        """Make every kind of call once, so that no later one waits for a kernel."""
        rows = list(range(self.num_envs))
        self.reset(rows, rows)
        self.step(self.expert())
        self.observe(rows[:1])
        self.render(0)

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
            asked = rotations.product(
                rotations.from_vector(ROTATION_RAD * actions[:, 3:6]), self._quaternion
            )
            turn = rotations.to_vector(rotations.product(asked, rotations.conjugate(quaternion)))
            self._quaternion = rotations.product(
                rotations.from_vector(rotations.limited(turn, LEASH_RAD)), quaternion
            )
        arm = self._world.towards(self._position, self._quaternion, self.now, self._joints[:, ARM])
        opening = FINGER_CLOSED_M + (FINGER_OPEN_M - FINGER_CLOSED_M) * (actions[:, -1:] + 1) / 2
        self._joints = torch.cat([arm, opening, opening], dim=1)
        self._world.step(self._joints)
        self.now = self._world.read()
        success = predicates.success(self.scene, self.now)
        if self._options["reward"] == "sparse":
            return success.float(), success, success
        done = predicates.progress(self.scene, self.now)
        reward = done - self._progress
        self._progress = done
        return reward, success, success

    def observe(self, rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        state = torch.cat(
            [self.now.tool, self.now.tool_quaternion, self.now.finger[:, None]], dim=1
        )[rows]
        return state, {
            name: torch.stack([self._image(name, row) for row in rows]).to(self.device)
            for name in self.spec.images
        }

    def expert(self) -> Tensor:
        action = expert_actions(self.scene, self.now)
        if not self._options["rotations"]:
            return action
        # Correct the commanded orientation; the tool's own lags, and correcting it would overshoot.
        back = rotations.product(
            self._quaternion.new_tensor(POINTING_DOWN), rotations.conjugate(self._quaternion)
        )
        turn = (rotations.to_vector(back) / ROTATION_RAD).clamp(-1, 1)
        return torch.cat([action[:, :3], turn, action[:, 3:]], dim=1)

    def render(self, index: int) -> Tensor:
        return self._image("", index)

    def close(self) -> None:
        self._world.close()

    def _image(self, camera: str, row: int) -> Tensor:
        return torch.from_numpy(self._world.image(camera, row).copy())

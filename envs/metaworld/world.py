"""One of Meta-World's environments: seeded episodes, images and the expert of its task."""

from __future__ import annotations

import warnings
from typing import Any

import mujoco
import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from metaworld.policies import ENV_POLICY_MAP
from numpy.typing import NDArray

UPSIDE_DOWN = ("corner", "corner2", "corner3", "corner4")
"""Cameras that Meta-World mounts upside down: it rotates what they see by 180 degrees."""
FINGER_M = 0.04
"""Way of the right finger from open to closed."""


class World:
    """An environment of one task, and its present episode. Units and axes are Meta-World's."""

    def __init__(self, task: str, fast: bool) -> None:
        self.task = task
        env = self._env = ALL_V3_ENVIRONMENTS[task]()
        # As Meta-World's benchmarks MT1 to MT50 do: show the goal. Unlike theirs, an episode draws
        # objects and goal from its own seed, not one of 50 goals.
        env._partially_observable = False
        env.__dict__.pop("sawyer_observation_space", None)  # cached, and bounds the goal
        env._set_task_called = True
        env._freeze_rand_vec = False
        env.seeded_rand_vec = True
        env.max_path_length = np.inf  # the pool truncates episodes
        self._policy = ENV_POLICY_MAP[task]()
        self._fast = fast
        self._renderers: dict[tuple[int, bool], mujoco.Renderer] = {}

    def begin(self, seed: int) -> None:
        self._env.seed(seed)
        self.observation, _ = self._env.reset()
        """Of the present frame, the one before and the goal: float64 ``[39]``."""

    def step(self, action: NDArray[Any]) -> tuple[float, bool]:
        """Execute one step of Meta-World with ``[4]``; return its reward, 0 to 10, and success."""
        self.observation, reward, _, _, info = self._env.step(action)
        return float(reward), bool(info["success"])

    def expert(self) -> NDArray[Any]:
        """Action ``[4]`` of Meta-World's own policy, a function of the observation alone."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of actions above 1, which Meta-World clips
            return np.clip(self._policy.get_action(self.observation), -1, 1)

    def tool(self) -> tuple[NDArray[Any], NDArray[Any], float]:
        """Return tool centre point (m), quaternion w x y z, a finger's way from closed (m)."""
        env = self._env
        finger = FINGER_M - float(env.data.joint("r_close").qpos[0])
        return env.tcp_center.copy(), env.data.body("hand").xquat.copy(), finger

    def image(self, camera: str, size: int, exact: bool = False) -> NDArray[np.uint8]:
        """Render ``[size, size, 3]``, upright. ``exact``: even in a fast world."""
        fast = self._fast and not exact
        renderer = self._renderers.get((size, fast)) or self._renderer(size, fast)
        renderer.update_scene(self._env.data, camera)
        if fast:
            for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
                renderer.scene.flags[flag] = False
        seen = renderer.render()
        return seen[::-1, ::-1].copy() if camera in UPSIDE_DOWN else seen

    def close(self) -> None:
        for renderer in self._renderers.values():
            renderer.close()
        self._env.close()

    def _renderer(self, size: int, fast: bool) -> mujoco.Renderer:
        model = self._env.model
        samples = int(model.vis.quality.offsamples)
        try:
            model.vis.quality.offsamples = 0 if fast else samples
            self._renderers[size, fast] = mujoco.Renderer(model, size, size)
        finally:
            model.vis.quality.offsamples = samples
        return self._renderers[size, fast]

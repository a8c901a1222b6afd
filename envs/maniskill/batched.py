"""Run the gpu backend: one batch of environments in this process; tensors stay on the device.

Tested without a GPU, as a batch of one on the CPU, where it is bit-identical to the cpu backend.
Untested: ``physx_cuda`` itself, its speed and its memory. GPU trajectories differ from CPU ones,
and PhysX does not guarantee that they repeat.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.core.protocols import ToolUnits

from .experts import expert_actions
from .lowpoly import low_poly_visuals
from .simulator import PICTURE_SIZE, Outcome, make, proprioception, rotation_signs, stack, tool_units


class ManiSkillBatch:
    """One ManiSkill base environment as a :class:`Batch`."""

    def __init__(self, options: dict[str, Any], num_envs: int, sim_backend: str, render_backend: str) -> None:
        with ExitStack() as visuals:
            if options["low_poly"]:
                visuals.enter_context(low_poly_visuals())
            self._env = make(options, num_envs, sim_backend, render_backend)
        self._options, self._outcome = options, Outcome(self._env, options)
        self.num_envs, self.device = num_envs, torch.device(self._env.device)
        self._signs = torch.from_numpy(rotation_signs(self._env)).to(self.device)
        self.action_dim, self.state_dim, self.control_hz = len(self._signs), 8, float(self._env.control_freq)
        self.images, self.picture = {"base": (options["image_size"],) * 2}, (PICTURE_SIZE,) * 2
        units = tool_units(self._env)
        self.tool = None if units is None else ToolUnits(*units)
        self.stack = stack(self._env)
        self._initialize, self._env._initialize_episode = self._env._initialize_episode, self._initialize_one_by_one

    def reset(self, seeds: list[int], rows: list[int]) -> list[str]:
        self._env.reset(seed=seeds, options={"env_idx": torch.tensor(rows, device=self.device)})
        self._outcome.begin(rows)
        if hasattr(self._env, "get_language_instruction"):
            return [str(text) for text in self._env.get_language_instruction()]
        return [self._options["instruction"]] * self.num_envs

    def _initialize_one_by_one(self, rows: Tensor, options: dict[str, Any]) -> None:
        """Initialise each row separately, with its own generators.

        ManiSkill draws the layouts of all rows from the seed of environment 0, but an episode must
        depend on its own seed alone.
        """
        env = self._env
        for row in rows.tolist():
            torch.manual_seed(int(env._episode_seed[row]))  # ManiSkill restores the global generator after the reset
            env._episode_rng = env._batched_episode_rng[row]
            env.scene._reset_mask = torch.zeros_like(env.scene._reset_mask)
            env.scene._reset_mask[row] = True
            self._initialize(torch.tensor([row], device=self.device), options)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, reward, terminated, _, info = self._env.step(actions * self._signs)
        reward, success = self._outcome(reward, info)
        return reward, terminated, success

    def observe(self, rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        image = self._env._get_obs_sensor_data()[self._options["camera"]]["rgb"]
        return proprioception(self._env)[rows], {"base": image.to(self.device)[rows]}

    def expert(self) -> Tensor:
        return expert_actions(self._env)

    def render(self, index: int) -> Tensor:
        picture: Tensor = self._env.render()[index].cpu()
        return picture

    def close(self) -> None:
        self._env.close()

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

from .lowpoly import low_poly_visuals
from .simulator import ManiSkillEnv


class ManiSkillBatch(ManiSkillEnv):
    """Implements ``Batch``."""

    def __init__(self, options: dict[str, Any], num_envs: int, sim_backend: str, render_backend: str) -> None:
        with ExitStack() as visuals:
            if options["low_poly"]:
                visuals.enter_context(low_poly_visuals())
            super().__init__(options, num_envs, sim_backend, render_backend)
        self.device = torch.device(self.env.device)
        self._initialize, self.env._initialize_episode = self.env._initialize_episode, self._initialize_one_by_one

    def reset(self, seeds: list[int], rows: list[int]) -> list[str]:
        self.env.reset(seed=seeds, options={"env_idx": torch.tensor(rows, device=self.device)})
        return self.begun(rows)

    def _initialize_one_by_one(self, rows: Tensor, options: dict[str, Any]) -> None:
        """Initialise each row separately, with its own generators.

        ManiSkill draws the layouts of all rows from the seed of environment 0, but an episode must
        depend on its own seed alone.
        """
        env = self.env
        for row in rows.tolist():
            torch.manual_seed(int(env._episode_seed[row]))  # ManiSkill restores the global generator after the reset
            env._episode_rng = env._batched_episode_rng[row]
            env.scene._reset_mask = torch.zeros_like(env.scene._reset_mask)
            env.scene._reset_mask[row] = True
            self._initialize(torch.tensor([row], device=self.device), options)

    def close(self) -> None:
        self.env.close()

"""The gpu backend of ManiSkill: one batch, in which each episode depends on its own seed alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..batch_serving import BatchServer
from ..serving import serve
from .lowpoly import low_poly_visuals
from .row_draws import NotByRow, rows_drawn
from .simulator import ManiSkillEnv


class Targets:
    """What a controller aims at, which a reset of some environments leaves alone in the others.

    At the end of a reset ManiSkill lets its controllers begin anew in all environments.
    """

    def __init__(self, controller: Any, scene: Any) -> None:
        self._scene = scene
        self._reset = controller.reset
        controller.reset = self._reset_rows
        self._rows: Tensor | None = None
        """That begin; None: all."""

    @contextmanager
    def of_rows(self, rows: Tensor) -> Iterator[None]:
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def _reset_rows(self) -> None:
        everywhere = self._scene._reset_mask
        if self._rows is not None:
            self._scene._reset_mask = torch.zeros_like(everywhere)
            self._scene._reset_mask[self._rows] = True
        self._reset()
        self._scene._reset_mask = everywhere


class ManiSkillBatch(ManiSkillEnv):
    """The gpu backend: implements ``Batch``; each process makes its own scene on the GPU.

    Tested without a GPU, as a batch of one on the CPU, where it is bit-identical to the cpu
    backend. Untested: ``physx_cuda`` itself, its speed and its memory. GPU trajectories differ from
    CPU ones, and PhysX does not guarantee that they repeat.
    """

    def __init__(
        self, options: dict[str, Any], num_envs: int, sim_backend: str, render_backend: str
    ) -> None:
        with ExitStack() as visuals:
            if options["low_poly"]:
                visuals.enter_context(low_poly_visuals())
            super().__init__(options, num_envs, sim_backend, render_backend)
        self.device = torch.device(self.env.device)
        env = self.env
        if not getattr(env, "draws_each_row", False):
            self._initialize = env._initialize_episode
            env._initialize_episode = self._initialize_rows
        self._draws_by_row = True
        """Whether the task's layouts can be drawn together."""
        self._is_grasping = env.agent.is_grasping
        env.agent.is_grasping = self._is_grasping_now
        self._targets = Targets(env.agent.controller, env.scene)

    def reset(self, seeds: list[int], rows: list[int]) -> list[str]:
        begin = torch.tensor(rows, device=self.device)
        with self._targets.of_rows(begin):
            self.env.reset(seed=seeds, options={"env_idx": begin})
        return self.begun(rows)

    def _is_grasping_now(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Answer no until an episode's first step: PhysX still has the last episode's contacts."""
        is_grasping: Tensor = self._is_grasping(*arguments, **keywords)
        return is_grasping & (self.env.elapsed_steps > 0)

    def _initialize_rows(self, rows: Tensor, options: dict[str, Any]) -> None:
        """Initialise all rows at once, or one by one if the task draws what has no rows."""
        if self._draws_by_row:
            try:
                self._initialize_together(rows, options)
                return
            except NotByRow:
                self._draws_by_row = False
                self.env._set_episode_rng(self.env._episode_seed, rows)
        self._initialize_one_by_one(rows, options)

    def _initialize_together(self, rows: Tensor, options: dict[str, Any]) -> None:
        env = self.env
        seeds = [int(env._episode_seed[row]) for row in rows.tolist()]
        numbers = [env._batched_episode_rng[row] for row in rows.tolist()]
        with rows_drawn(seeds, numbers) as env._episode_rng:
            self._initialize(rows, options)

    def _initialize_one_by_one(self, rows: Tensor, options: dict[str, Any]) -> None:
        """Initialise each row separately, with its own generators."""
        env = self.env
        for row in rows.tolist():
            torch.manual_seed(
                int(env._episode_seed[row])
            )  # ManiSkill restores the global generator after the reset
            env._episode_rng = env._batched_episode_rng[row]
            env.scene._reset_mask = torch.zeros_like(env.scene._reset_mask)
            env.scene._reset_mask[row] = True
            self._initialize(torch.tensor([row], device=self.device), options)

    def close(self) -> None:
        self.env.close()


def create_batch(options: dict[str, Any], slots: int) -> ManiSkillBatch:
    return ManiSkillBatch(options, slots, options["sim_backend"], options["render_backend"])


if __name__ == "__main__":
    os.environ["MS_SKIP_ASSET_DOWNLOAD_PROMPT"] = "1"
    serve(create_batch, BatchServer)

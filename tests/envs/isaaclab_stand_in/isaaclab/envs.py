"""``ManagerBasedRLEnv``: steps a batch, and resets ended environments within ``step``."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .app import AppLauncher
from .utils.math import SHIFT, turned

assert AppLauncher.launched is not None, "launch the application first"


class TerminationManager:
    def __init__(self, terms: dict[str, Any], env: ManagerBasedRLEnv) -> None:
        self._terms = {name: term for name, term in terms.items() if term is not None}
        self._env = env
        self._dones = {name: torch.zeros(env.num_envs, dtype=torch.bool) for name in self._terms}

    @property
    def active_terms(self) -> list[str]:
        return list(self._terms)

    def compute(self) -> tuple[Tensor, Tensor]:
        ended = {
            True: torch.zeros(self._env.num_envs, dtype=torch.bool),
            False: torch.zeros(self._env.num_envs, dtype=torch.bool),
        }
        for name, term in self._terms.items():
            fired = term.func(self._env)
            for other in self._dones.values():
                other[fired] = False
            self._dones[name][fired] = (
                True  # as before 2.3.1: rows that did not end keep their value
            )
            ended[term.time_out] |= fired
        return ended[False], ended[True]

    def get_term(self, name: str) -> Tensor:
        return self._dones[name]


class ManagerBasedRLEnv:
    def __init__(self, cfg: Any) -> None:
        assert AppLauncher.launched is not None and AppLauncher.launched["headless"]
        self.cfg = cfg
        self.num_envs = cfg.scene.num_envs
        self.device = cfg.sim.device
        self.step_dt = cfg.sim.dt * cfg.decimation
        self.max_episode_length = math.ceil(cfg.episode_length_s / self.step_dt)
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.tool = torch.zeros(self.num_envs, 3)
        self.quaternion = torch.zeros(self.num_envs, 4)
        self.finger = torch.zeros(self.num_envs)
        self.cube = torch.zeros(self.num_envs, 3)
        self.action_manager = SimpleNamespace(total_action_dim=7)
        self.termination_manager = TerminationManager(vars(cfg.terminations), self)
        self.seed(cfg.seed)

    @property
    def unwrapped(self) -> ManagerBasedRLEnv:
        return self

    @staticmethod
    def seed(seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)

    def reset(
        self,
        seed: int | None = None,
        env_ids: Tensor | None = None,
        options: dict[str, Any] | None = None,
    ) -> Any:
        if seed is not None:
            self.seed(seed)
        self._reset_idx(torch.arange(self.num_envs) if env_ids is None else env_ids)
        return self._observed(), {}

    def step(self, action: Tensor) -> Any:
        assert action.shape == (self.num_envs, 7)
        scale = torch.as_tensor(self.cfg.actions.arm_action.scale).expand(6)
        self.tool += action[:, :3] * scale[:3]
        self.quaternion = turned(self.quaternion, action[:, 3:6] * scale[3:])
        self.finger = (self.finger + torch.where(action[:, 6] < 0, -0.01, 0.01)).clamp(0, 0.04)
        self.episode_length_buf += 1
        terminated, truncated = self.termination_manager.compute()
        reward = -(self.tool - self.cube).norm(dim=1)
        ended = (terminated | truncated).nonzero()[:, 0]
        if len(ended):
            self._reset_idx(ended)
        torch.rand(3)  # as events of mode "interval" do
        return self._observed(), reward, terminated, truncated, {"log": {}}

    def close(self) -> None:
        pass

    def _reset_idx(self, env_ids: Tensor) -> None:
        drawn, around = torch.rand(len(env_ids), 3), torch.rand(len(env_ids), 3)
        self.tool[env_ids] = torch.tensor([0.4, 0.0, 0.3]) + 0.01 * around
        self.quaternion[env_ids] = torch.tensor([0.0, 1.0, 0.0, 0.0])
        self.finger[env_ids] = 0.04
        self.cube[env_ids] = torch.tensor([0.4, -0.2, 0.0]) + drawn * torch.tensor([0.2, 0.4, 0.02])
        self.episode_length_buf[env_ids] = 0

    def _observed(self) -> dict[str, Any]:
        found = {}
        for group, terms in vars(self.cfg.observations).items():
            values = {
                name: term.func(self) for name, term in vars(terms).items() if hasattr(term, "func")
            }
            noise = torch.rand(1) if terms.enable_corruption else 0
            values = {
                name: value if value.dtype == torch.uint8 else value + noise
                for name, value in values.items()
            }
            found[group] = (
                torch.cat(list(values.values()), dim=1) if terms.concatenate_terms else values
            )
        return found


def eef_pos(env: ManagerBasedRLEnv) -> Tensor:
    return env.tool.clone()


def eef_quat(env: ManagerBasedRLEnv) -> Tensor:
    return env.quaternion.roll(SHIFT, dims=1)


def gripper_pos(env: ManagerBasedRLEnv) -> Tensor:
    return torch.stack([env.finger, -env.finger], dim=1)


def cube_pos(env: ManagerBasedRLEnv) -> Tensor:
    return env.cube.clone()


def image(env: ManagerBasedRLEnv) -> Tensor:
    """RGBA, of ``cfg.scene.table_cam``'s size: its shade tells where tool and cube are."""
    camera = env.cfg.scene.table_cam
    shade = (
        200 * torch.stack([env.tool[:, 0], env.cube[:, 0], env.cube[:, 1].abs(), env.finger], dim=1)
    ).clamp(0, 255)
    return shade.to(torch.uint8)[:, None, None].repeat(1, camera.height, camera.width, 1)


def time_out(env: ManagerBasedRLEnv) -> Tensor:
    return env.episode_length_buf >= env.max_episode_length


def reached(env: ManagerBasedRLEnv) -> Tensor:
    return (env.tool - env.cube).abs().amax(1) < 0.03


def fell(env: ManagerBasedRLEnv) -> Tensor:
    return env.tool[:, 2] < -0.2

"""An environment group whose steps are worth what a reward plug-in says."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlinf_vla.protocols import Reward, VectorEnv
from rlinf_vla.types import Episodes, Observation, StepResult


def own_reward(before: Observation, actions: Tensor, result: StepResult) -> StepResult:
    """The environment's."""
    return result


class RewardedEnv(VectorEnv):
    """``env`` with ``weight`` times ``reward``, plus ``env_weight`` times its own; with ``terminal``, in an episode's last step alone."""

    def __init__(self, env: VectorEnv, reward: Reward, weight: float = 1.0, env_weight: float = 0.0, terminal: bool = False) -> None:
        self.spec = env.spec
        self._env, self._reward = env, reward
        self._weight, self._env_weight, self._terminal = weight, env_weight, terminal

    _seen: Observation
    _actions: Tensor

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        self._env.reset_async(episodes, mask)

    def reset_wait(self) -> Observation:
        self._seen = self._env.reset_wait()
        return self._seen

    def step_async(self, actions: Tensor) -> None:
        self._actions = actions
        self._env.step_async(actions)

    def step_wait(self) -> StepResult:
        """Raises ValueError where the reward is not a finite number of the right shape for every step that counts."""
        result = self._env.step_wait()
        scored = self._reward(self._seen, self._actions, result)
        self._seen = result.observation
        if scored.reward.shape != result.valid.shape:
            raise ValueError(f"the reward plug-in returned shape {tuple(scored.reward.shape)}, expected {tuple(result.valid.shape)}")
        counts = result.valid
        if self._terminal:
            counts = counts & (scored.terminated | scored.truncated)
        earned = torch.where(counts, self._weight * scored.reward + self._env_weight * result.reward, 0.0)
        if not bool(earned.isfinite().all()):
            raise ValueError("the reward plug-in returned a reward that is not finite")
        return replace(scored, reward=earned)

    def render(self, index: int) -> Tensor:
        return self._env.render(index)

    def expert_actions(self) -> Tensor:
        return self._env.expert_actions()

    def close(self) -> None:
        self._env.close()

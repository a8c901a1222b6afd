"""Base of environments that change what another one is given or tells."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import Episodes, Observation, StepResult


class WrappedEnv(VectorEnv):
    """Pass every call on to ``env``; subclasses override what they change."""

    def __init__(self, env: VectorEnv) -> None:
        self.spec = env.spec
        self._env = env

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        self._env.reset_async(episodes, mask)

    def reset_wait(self) -> Observation:
        return self._env.reset_wait()

    def step_async(self, actions: Tensor, skip_ended: bool = False) -> None:
        self._env.step_async(actions, skip_ended)

    def step_wait(self) -> StepResult:
        return self._env.step_wait()

    def add_jpeg(self, cameras: Sequence[str]) -> None:
        self._env.add_jpeg(cameras)

    def render(self, index: int) -> Tensor:
        return self._env.render(index)

    def expert_actions(self) -> Tensor:
        return self._env.expert_actions()

    def losses(self) -> int:
        return self._env.losses()

    def close(self) -> None:
        self._env.close()

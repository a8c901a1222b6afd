"""Vector environment for a simulator that steps all environments as one batch in this process.

Tensors stay on the device. :class:`BatchedVectorEnv` implements the chunk logic; a simulator
implements :class:`Batch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.images import through_jpeg
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import Episodes, Observation, StepResult

from .checks import checked_actions, checked_episodes, spec_of
from .shared_arrays import SimulatorSpec

WORTH_A_GPU = 64
"""Smallest number of environments for which ``backend=auto`` chooses the GPU."""


def why_not_on_gpu(groups: int) -> str | None:
    """Return why no batch can be stepped on the GPU of this process; None if one can."""
    if not torch.cuda.is_available():
        return "env.backend=gpu needs a CUDA GPU that PyTorch sees: use env.backend=cpu"
    if groups > 1:
        return "env.backend=gpu steps all environments as one batch, so there is nothing to overlap: use rollout.pipeline_depth=1"
    return None


def use_gpu(backend: str, num_envs: int, refusal: str | None) -> bool:
    """Decide whether to run on the GPU. ``refusal``: why the GPU cannot be used, or None.

    Raises UserError if ``backend`` is ``gpu`` nevertheless.
    """
    if backend == "gpu" and refusal is not None:
        raise UserError(refusal)
    return backend == "gpu" or (backend == "auto" and refusal is None and num_envs >= WORTH_A_GPU)


class Batch(Protocol):
    """``N`` environments, reset one by one but stepped together. Tensors lie on ``device``."""

    num_envs: int
    device: torch.device

    @property
    def spec(self) -> SimulatorSpec: ...

    def reset(self, seeds: list[int], rows: list[int]) -> list[str]:
        """Reset ``rows``; ``seeds`` has one entry for each of the ``N`` environments.

        An episode depends on its own seed only. Returns the ``N`` current instructions.
        """

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run one control step of all environments with ``actions`` ``[N, D]``.

        Returns reward float32, terminated bool and success bool, each ``[N]``.
        """

    def observe(self, rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        """Observe ``R`` rows: state float32 ``[R, S]``, images name -> uint8 ``[R, H, W, 3]``."""

    def expert(self) -> Tensor:
        """The scripted expert's actions for the present state: float32 ``[N, D]``."""

    def render(self, index: int) -> Tensor:
        """Image of one environment for display: uint8 ``[H, W, 3]``."""

    def close(self) -> None: ...


class BatchedVectorEnv(VectorEnv):
    """Vector environment on top of a :class:`Batch`.

    A batch cannot pause single environments. One whose episode ends inside a chunk keeps stepping
    until the chunk is over: its final observation is kept and returned, its later steps are marked
    invalid, and it must be reset before the next chunk.
    """

    def __init__(self, batch: Batch, episode_limit: int, tasks: tuple[str, ...], no_expert: str | None = None) -> None:
        self._batch, self._no_expert, self._closed = batch, no_expert, False
        n, device = batch.num_envs, batch.device
        self.spec = spec_of(batch.spec, n, episode_limit, tasks, device)
        self._seeds = [0] * n
        self._executed = torch.zeros(n, dtype=torch.int64, device=device)
        self._under_way = torch.zeros(n, dtype=torch.bool, device=device)
        self._state = torch.zeros(n, self.spec.state_dim, device=device)
        self._images = {name: torch.zeros(n, *size, 3, dtype=torch.uint8, device=device) for name, size in self.spec.images.items()}
        self._jpeg: dict[str, Tensor] = {}
        self._instruction = [""] * n
        self._result: StepResult | None = None

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        if self._closed:
            raise RuntimeError("the vector environment is closed")
        rows = checked_episodes(self.spec, episodes, mask)
        seeds = episodes.seed.tolist()
        for row in rows:
            self._seeds[row] = seeds[row]
        self._instruction = self._batch.reset(list(self._seeds), rows)
        chosen = torch.zeros_like(self._under_way)
        chosen[rows] = True
        self._executed[chosen] = 0
        self._under_way |= chosen
        self._look(chosen)

    def reset_wait(self) -> Observation:
        return self._observation()

    def step_async(self, actions: Tensor) -> None:
        actions = checked_actions(self.spec, actions)
        if not self._under_way.all():
            raise RuntimeError(f"environment {int((~self._under_way).nonzero()[0])} has no episode under way: reset it first")
        shape = (self.spec.num_envs, actions.shape[1])
        reward = torch.zeros(shape, device=self.spec.device)
        terminated, truncated, success, valid = (torch.zeros(shape, dtype=torch.bool, device=self.spec.device) for _ in range(4))
        unseen = self._under_way.clone()
        for c in range(actions.shape[1]):
            alive = self._under_way.clone()
            earned, fell, reached = self._batch.step(actions[:, c])
            self._executed += alive
            valid[:, c] = alive
            reward[:, c] = torch.where(alive, earned, 0.0)
            success[:, c] = reached & alive
            terminated[:, c] = fell & alive
            truncated[:, c] = alive & ~fell & (self._executed >= self.spec.episode_limit)
            ended = terminated[:, c] | truncated[:, c]
            self._under_way &= ~ended
            if ended.any():
                self._look(ended)
                unseen &= ~ended
            if not self._under_way.any():
                break
        if unseen.any():
            self._look(unseen)
        self._result = StepResult(self._observation(), reward, terminated, truncated, success, valid)

    def step_wait(self) -> StepResult:
        if self._result is None:
            raise RuntimeError("step_wait without step_async")
        result, self._result = self._result, None
        return result

    def add_jpeg(self, cameras: Sequence[str]) -> None:
        self._jpeg = {name: torch.zeros_like(image) for name, image in self._images.items() if name in cameras}

    def render(self, index: int) -> Tensor:
        return self._batch.render(index)

    def expert_actions(self) -> Tensor:
        if self._no_expert is not None:
            raise UserError(self._no_expert)
        return self._batch.expert()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._batch.close()

    def _look(self, chosen: Tensor) -> None:
        """Refresh the stored observation of the environments in ``chosen`` (bool ``[N]``).

        Out of place, so that observations returned earlier do not change.
        """
        rows = chosen.nonzero().flatten()
        state, images = self._batch.observe(rows.tolist())
        self._state = self._state.index_copy(0, rows, state)
        self._images = {name: self._images[name].index_copy(0, rows, image) for name, image in images.items()}
        self._jpeg = {name: image.index_copy(0, rows, through_jpeg(images[name])) for name, image in self._jpeg.items()}

    def _observation(self) -> Observation:
        return Observation(dict(self._images), self._state, list(self._instruction), dict(self._jpeg))

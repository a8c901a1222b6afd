"""Vector environment made of simulators in separate processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import Episodes, Observation, StepResult

from .checks import checked_actions, checked_episodes, spec_of
from .processes import SimulatorPool


def environments(
    config: Any,
    groups: int,
    program: Sequence[str],
    options: dict[str, Any],
    processes: int,
    *,
    tasks: tuple[str, ...],
    no_expert: str | None,
    **others: Any,
) -> list[VectorEnv]:
    """Make ``groups`` vector environments from a recipe's ``env`` node.

    processes: of one group. others: further arguments of :class:`SimulatorPool`, as are ``program``
    and ``options``. Closes all pools if one of them cannot start.
    """
    sizes: dict[str, Any] = {
        "slots": config.num_envs // groups,
        "processes": processes,
        "step_timeout": config.step_timeout_s,
    }
    pools = [SimulatorPool(program, options, **sizes, **others) for _ in range(groups)]
    try:
        return [ProcessVectorEnv(pool, tasks, no_expert) for pool in pools]
    except BaseException:
        for pool in pools:
            pool.close()
        raise


class ProcessVectorEnv(VectorEnv):
    """All slots of one :class:`SimulatorPool`.

    ``reset_async`` and ``step_async`` return at once, while the processes work in the background.
    Tensors are on the device of the pool's frames, except ``render``'s.

    no_expert: error message of ``expert_actions``; None if the task has an expert.
    """

    def __init__(
        self, pool: SimulatorPool, tasks: tuple[str, ...], no_expert: str | None = None
    ) -> None:
        self.pool = pool
        self._no_expert = no_expert
        self._ended = [False] * pool.slots
        self._failed: dict[int, int] = {}
        """Slots whose episode ends in the next step; the index in ``FAULTS`` of the reason."""
        self.spec = spec_of(pool.spec, pool.slots, pool.episode_limit, tasks, pool.frames.device)
        self._instruction = [(self.spec.instructions or tasks)[0]] * pool.slots

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        rows = checked_episodes(self.spec, episodes, mask)
        seeds, task_ids = episodes.seed.tolist(), episodes.task_id.tolist()
        self.pool.begin("reset", [[row, seeds[row], task_ids[row]] for row in rows])
        for row in rows:
            self._ended[row] = False
            self._failed.pop(row, None)

    def reset_wait(self) -> Observation:
        for index, instruction in self._finish().items():
            self._instruction[index] = instruction
        return self._observation()

    def step_async(self, actions: Tensor, skip_ended: bool = False) -> None:
        chunks = checked_actions(self.spec, actions).numpy()
        rows = []
        for index in range(self.spec.num_envs):
            begin = self.pool.executed(index)
            if index in self._failed or (self._ended[index] and skip_ended):
                continue
            if begin is None or self._ended[index]:
                raise RuntimeError(f"environment {index} has no episode under way: reset it first")
            end = min(begin + chunks.shape[1], self.spec.episode_limit)
            rows.append([index, begin, end])
        for index, begin, end in rows:
            self.pool.arrays.actions[index, begin:end] = chunks[index, : end - begin]
        self._rows = rows
        self._chunk = chunks.shape[1]
        self.pool.begin("step", rows)

    def step_wait(self) -> StepResult:
        executed = self._finish()
        arrays = self.pool.arrays
        shape = (self.spec.num_envs, self._chunk)
        reward = np.zeros(shape, np.float32)
        fault = np.zeros(shape, np.uint8)
        terminated, truncated, success, valid = (np.zeros(shape, np.bool_) for _ in range(4))
        for (
            index,
            begin,
            _,
        ) in (
            self._rows
        ):  # numpy: element access to tensors costs ten times as much, and a step has hundreds
            if index in self._failed:
                continue
            end = executed[index]
            count = end - begin
            reward[index, :count] = arrays.reward[index, begin:end]
            terminated[index, :count] = arrays.terminated[index, begin:end]
            success[index, :count] = arrays.success[index, begin:end]
            valid[index, :count] = True
            fell = bool(terminated[index, count - 1])
            over = end == self.spec.episode_limit or bool(arrays.truncated[index, end - 1])
            # Termination in the last allowed step is not truncation: there is no bootstrap value.
            truncated[index, count - 1] = over and not fell
            self._ended[index] = fell or over
        for index, reason in self._failed.items():
            fault[index, 0] = reason
            valid[index, 0] = truncated[index, 0] = self._ended[index] = True
        self._failed.clear()
        tensors = (
            torch.from_numpy(array) for array in (reward, terminated, truncated, success, valid)
        )
        return replace(
            StepResult(self._observation(), *tensors), fault=torch.from_numpy(fault)
        ).outcome_to(self.spec.device)

    def add_jpeg(self, cameras: Sequence[str]) -> None:
        self.pool.arrays.as_jpeg[:] = [name in cameras for name in self.spec.images]

    def render(self, index: int) -> Tensor:
        if not 0 <= index < self.spec.num_envs:
            raise IndexError(f"there is no environment {index}; there are {self.spec.num_envs}")
        self.pool.begin("render", self._playing([index]))
        self._finish()
        return torch.from_numpy(self.pool.arrays.picture.copy())

    def expert_actions(self) -> Tensor:
        if self._no_expert is not None:
            raise UserError(self._no_expert)
        self.pool.begin("expert", self._playing(range(self.spec.num_envs)))
        self._finish()
        return torch.from_numpy(self.pool.arrays.expert.copy()).to(self.spec.device)

    def losses(self) -> int:
        return self.pool.restarts

    def close(self) -> None:
        self.pool.close()

    def _playing(self, slots: Sequence[int]) -> list[list[int]]:
        """Return a row for each of the slots that has an episode."""
        return [[slot] for slot in slots if self.pool.executed(slot) is not None]

    def _finish(self) -> dict[int, Any]:
        """Return the answers to the command in flight, and mark the episodes that it cut."""
        answers = self.pool.finish()
        self._failed |= {
            index: reason for index, reason in self.pool.cut.items() if not self._ended[index]
        }
        return answers

    def _observation(self) -> Observation:
        frames = self.pool.frames
        images = {name: image.clone() for name, image in frames.images.items()}
        jpeg = {
            name: frames.jpeg[name].clone()
            for name, chosen in zip(images, self.pool.arrays.as_jpeg, strict=True)
            if chosen
        }
        seen = Observation(images, frames.state.clone(), list(self._instruction), jpeg)
        frames.settle()
        return seen

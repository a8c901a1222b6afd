"""The only data that crosses rooms.

Letters used for shapes everywhere: ``B`` environments in a batch, ``T`` policy calls in a rollout,
``C`` actions in a chunk, ``D`` action dimensions, ``S`` proprioceptive state dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What a recipe may call the dtype of weights."""

Tensors = dict[str, Tensor]
"""By name, every tensor with the same leading dimension."""

Inputs = Tensors
"""Prepared policy inputs (uint8 images, token ids, ...), every tensor with leading dimension ``B``."""


@dataclass(frozen=True)
class Observation:
    """What the environments show.

    images: name -> uint8 ``[B, H, W, 3]``, RGB, upright.
    state: float32 ``[B, S]``, proprioception in SI units.
    instruction: ``B`` strings.
    """

    images: dict[str, Tensor]
    state: Tensor
    instruction: list[str]


MAX_TASKS = MAX_ATTEMPTS = 1 << 16
"""Task and attempt share a 32-bit word of the counter that the policy's random numbers are drawn by."""


@dataclass(frozen=True)
class Episodes:
    """Which episode each environment plays; an episode is fully determined by ``(task_id, seed)``.

    task_id: int64 ``[B]``, an index into ``EnvSpec.tasks``, below ``MAX_TASKS``.
    seed: int64 ``[B]``, 0 <= seed < 2**32.
    attempt: int64 ``[B]``, below ``MAX_ATTEMPTS``; the policy's noise differs between attempts at an episode, the environment does not.
    """

    task_id: Tensor
    seed: Tensor
    attempt: Tensor

    def __len__(self) -> int:
        return len(self.seed)

    def __getitem__(self, index: Any) -> Episodes:
        return Episodes(self.task_id[index], self.seed[index], self.attempt[index])

    @staticmethod
    def first_attempts(task_id: Tensor, seed: Tensor) -> Episodes:
        return Episodes(task_id, seed, torch.zeros_like(seed))

    def repeat(self, attempts: int) -> Episodes:
        """Each episode ``attempts`` times, one after the other. Raises ValueError where that is more than ``MAX_ATTEMPTS``."""
        if attempts > MAX_ATTEMPTS:
            raise ValueError(f"{attempts} attempts at an episode: at most {MAX_ATTEMPTS} have random numbers of their own")
        task_id, seed = (each.repeat_interleave(attempts) for each in (self.task_id, self.seed))
        return Episodes(task_id, seed, torch.arange(len(seed), device=seed.device) % attempts)

    @staticmethod
    def where(mask: Tensor, first: Episodes, second: Episodes) -> Episodes:
        names = [field.name for field in fields(Episodes)]
        return Episodes(*(torch.where(mask, getattr(first, name), getattr(second, name)) for name in names))


@dataclass(frozen=True)
class StepResult:
    """Up to ``C`` control steps of every environment.

    observation: after the last executed control step.
    reward: float32 ``[B, C]``; terminated, truncated, success, valid: bool ``[B, C]``.
    An environment stops at its first ``terminated`` or ``truncated``: what follows in the chunk was not executed,
    ``valid`` is false there and every other entry is zero.
    """

    observation: Observation
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    success: Tensor
    valid: Tensor

    @property
    def done(self) -> Tensor:
        """bool ``[B]``: the episode ended in this chunk."""
        return (self.terminated | self.truncated).any(dim=1)


@dataclass(frozen=True)
class ActionSample:
    """What a policy chose.

    actions: float32 ``[B, C, D]`` in the environment's units.
    latent: what ``Policy.evaluate`` needs to find this choice again (token ids, a denoising chain), leading dimension ``B``.
    log_prob: float32 ``[B, C, D]``, the finest grain that the policy has.
    value: float32 ``[B]``, the critic's estimate of the return from this observation.
    """

    actions: Tensor
    latent: dict[str, Tensor]
    log_prob: Tensor
    value: Tensor


@dataclass(frozen=True)
class ActionEval:
    """A choice under the present weights: log_prob and entropy float32 ``[B, C, D]``, value float32 ``[B]``."""

    log_prob: Tensor
    entropy: Tensor
    value: Tensor


@dataclass(frozen=True)
class Trajectory:
    """``T`` policy calls in ``B`` environments. Nothing is positional: masks, returns and statistics derive from these fields.

    Per call ``[T, B, ...]``: inputs, latent, log_prob ``[T, B, C, D]``, value, policy_version, and the episode that the call belongs
    to: task_id, seed, attempt, step (control steps already executed in that episode).
    bootstrap_value ``[T, B]``: the critic's estimate for the observation after the call where the episode was cut there
    (truncated, or the rollout ended); zero elsewhere. ``cut`` bool ``[T, B]`` says where that is.
    Per control step ``[T, B, C]``: reward, terminated, truncated, success, valid.
    reference ``[T, B, C, D]``: the log-probability of what was done under the policy to stay near; None: nobody asked.
    """

    inputs: Inputs
    latent: dict[str, Tensor]
    log_prob: Tensor
    value: Tensor
    bootstrap_value: Tensor
    cut: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    success: Tensor
    valid: Tensor
    task_id: Tensor
    seed: Tensor
    attempt: Tensor
    step: Tensor
    policy_version: Tensor
    reference: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """``(T, B)``."""
        return self.value.shape[0], self.value.shape[1]

    def __len__(self) -> int:
        return len(self.value)

    def episode_ids(self) -> Tensor:
        """int64, 0 ... E-1, shaped as ``seed``: which of the episodes each call belongs to."""
        return _numbered(self.task_id, self.seed, self.attempt)

    def group_ids(self) -> Tensor:
        """The same for groups: all attempts at one episode. No group can mix tasks."""
        return _numbered(self.task_id, self.seed)

    def group_of_episode(self) -> Tensor:
        """int64 ``[E]``."""
        episode, group = self.episode_ids().flatten(), self.group_ids().flatten()
        return group.new_zeros(int(episode.max()) + 1 if len(episode) else 0).index_put((episode,), group)

    def episode_success(self) -> Tensor:
        """bool ``[E]``: successful at least once."""
        episode, success = self.episode_ids().flatten(), (self.success & self.valid).any(-1).flatten()
        return torch.zeros(len(self.group_of_episode()), device=success.device).index_add(0, episode, success.float()) > 0

    def flatten(self) -> Trajectory:
        """The same calls as one long batch: every field ``[T * B, ...]``."""
        return _map(lambda x: x.flatten(0, 1), self)

    def __getitem__(self, index: Any) -> Trajectory:
        return _map(lambda x: x[index], self)

    def to(self, device: torch.device | str) -> Trajectory:
        return _map(lambda x: x.to(device), self)

    @staticmethod
    def cat(parts: Sequence[Trajectory], dim: int) -> Trajectory:
        return _map(lambda *xs: torch.cat(xs, dim), *parts)

    @staticmethod
    def stack(calls: Sequence[Trajectory]) -> Trajectory:
        """``T`` single calls with fields ``[B, ...]`` become one trajectory ``[T, B, ...]``."""
        return _map(lambda *xs: torch.stack(xs), *calls)


def _numbered(*keys: Tensor) -> Tensor:
    return torch.unique(torch.stack(keys, dim=-1).flatten(0, -2), dim=0, return_inverse=True)[1].reshape(keys[0].shape)


def _map(function: Callable[..., Tensor], first: Trajectory, *rest: Trajectory) -> Trajectory:
    changes: dict[str, Any] = {}
    for field in fields(first):
        values = [getattr(each, field.name) for each in (first, *rest)]
        if values[0] is None:
            continue
        if isinstance(values[0], dict):
            changes[field.name] = {key: function(*(value[key] for value in values)) for key in values[0]}
        else:
            changes[field.name] = function(*values)
    return replace(first, **changes)


Rollouts = Iterable[Trajectory]
"""Shards in a fixed order, each as soon as it is finished, as often as asked: ``[T, B]`` of some environments, or ``[N]`` calls of some
episodes."""


def gather(rollouts: Rollouts) -> Trajectory:
    """All shards as one; waits for the last."""
    shards = list(rollouts)
    return shards[0] if len(shards) == 1 else Trajectory.cat(shards, dim=shards[0].value.ndim - 1)


def flattened(shard: Trajectory) -> Trajectory:
    """``[N]`` calls of either kind of shard."""
    return shard.flatten() if shard.value.ndim == 2 else shard


class UserError(Exception):
    """The user's mistake, told in one line: what is wrong, where, and the mend. The command line exits with 2."""


class Failure(RuntimeError):
    """Something failed as often as it was tried again, and the first line of the message says what. The command line exits with 1."""


def require_one_of(key: str, value: str, known: Sequence[str]) -> None:
    """Raises UserError where the recipe's ``key`` has a ``value`` that is not known."""
    if value not in known:
        raise UserError(f"{key}={value}: one of {', '.join(known)}")

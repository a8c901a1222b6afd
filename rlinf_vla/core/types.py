"""Data types shared by all packages: observations, step results, samples, trajectories, errors.

Shape letters used everywhere: ``B`` environments in a batch, ``T`` policy calls in a rollout,
``C`` actions in a chunk, ``D`` action dimensions, ``S`` proprioceptive state dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from rlinf_vla.core.devices import moved

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Recipe names of the dtypes that weights may have."""
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that weights in a file may have."""

Tensors = dict[str, Tensor]
"""Named tensors that share their leading dimension."""

Inputs = Tensors
"""Prepared policy inputs (uint8 images, token ids, ...), each with leading dimension ``B``."""


def mapped(function: Callable[..., Tensor], first: Any, *others: Any) -> Any:
    """Return ``function(first, *others)``, entry by entry in :class:`Batched` and dictionaries."""
    if first is None:
        return None
    if isinstance(first, dict):
        return {
            key: mapped(function, value, *(other[key] for other in others))
            for key, value in first.items()
        }
    if isinstance(first, Batched):
        names = [field.name for field in fields(first)]  # type: ignore[arg-type]
        return type(first)(
            *(
                mapped(function, *(getattr(value, name) for value in (first, *others)))
                for name in names
            )
        )
    return function(first, *others)


class Batched:
    """Base of dataclasses of tensors whose first dimensions are the same.

    A field is a tensor, a dictionary of tensors, another ``Batched`` or None.
    """

    def __getitem__(self, index: Any) -> Self:
        return mapped(lambda x: x[index], self)

    def to(self, device: torch.device) -> Self:
        """Return the tensors on ``device``, moved in one copy."""
        tensors = iter(
            moved(
                {str(number): value for number, value in enumerate(self.tensors())}, device
            ).values()
        )
        return mapped(lambda _: next(tensors), self)

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in the order of the fields."""
        tensors: list[Tensor] = []
        mapped(lambda x: tensors.append(x) or x, self)  # type: ignore[func-returns-value]
        return tensors

    @classmethod
    def cat(cls, parts: Sequence[Self], dim: int = 0) -> Self:
        return mapped(lambda *xs: torch.cat(xs, dim), *parts)


@dataclass(frozen=True)
class Observation:
    """One observation of ``B`` environments.

    images: name -> ``[B, H, W, channels]``, as ``core/observation_features.py`` says of the
        camera's name.
    state: float32 ``[B, S]``, proprioception in SI units.
    instruction: ``B`` strings.
    jpeg: images of some cameras once more, after a JPEG round trip (``core/jpeg.py``).
    """

    images: dict[str, Tensor]
    state: Tensor
    instruction: list[str]
    jpeg: dict[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> Observation:
        """Return the observation on ``device``, moved in one copy."""
        kinds = {"image.": self.images, "jpeg.": self.jpeg}
        tensors = moved(
            {"state": self.state}
            | {kind + name: tensor for kind in kinds for name, tensor in kinds[kind].items()},
            device,
        )
        images, jpeg = ({name: tensors[kind + name] for name in kinds[kind]} for kind in kinds)
        return Observation(images, tensors["state"], self.instruction, jpeg)


MAX_TASKS = MAX_ATTEMPTS = 1 << 16
"""Task and attempt share one 32-bit word of the counter of the policy's random number generator."""


@dataclass(frozen=True)
class Episodes(Batched):
    """The episode of each environment; ``(task_id, seed)`` fully determines an episode.

    task_id: int64 ``[B]``, an index into ``EnvSpec.tasks``, below ``MAX_TASKS``.
    seed: int64 ``[B]``, 0 <= seed < 2**32.
    attempt: int64 ``[B]``, below ``MAX_ATTEMPTS``. Attempts at an episode differ only in the
    policy's noise.
    """

    task_id: Tensor
    seed: Tensor
    attempt: Tensor

    def __len__(self) -> int:
        return len(self.seed)

    @staticmethod
    def first_attempts(task_id: Tensor, seed: Tensor) -> Episodes:
        return Episodes(task_id, seed, torch.zeros_like(seed))

    def repeat(self, attempts: int) -> Episodes:
        """Repeat each episode ``attempts`` times. Raises ValueError above ``MAX_ATTEMPTS``."""
        if attempts > MAX_ATTEMPTS:
            raise ValueError(
                f"{attempts} attempts at an episode are too many: at most {MAX_ATTEMPTS} get distinct random numbers"
            )
        task_id, seed = (column.repeat_interleave(attempts) for column in (self.task_id, self.seed))
        return Episodes(task_id, seed, torch.arange(len(seed), device=seed.device) % attempts)

    @staticmethod
    def where(mask: Tensor, first: Episodes, second: Episodes) -> Episodes:
        return mapped(lambda a, b: torch.where(mask, a, b), first, second)


FAULTS = (
    "",
    "a state that is not finite",
    "a reward that is not finite",
    "an exception in the simulator",
    "lost simulator processes",
)
"""Why an episode was cut that neither its simulator nor its time limit ended; first: it was not."""
STATE_FAULT, REWARD_FAULT, EXCEPTION_FAULT, LOST_FAULT = range(1, len(FAULTS))


@dataclass(frozen=True)
class StepResult:
    """The result of up to ``C`` control steps in every environment.

    observation: after the last executed control step.
    reward: float32 ``[B, C]``; terminated, truncated, success, valid: bool ``[B, C]``.
    An environment stops at its first ``terminated`` or ``truncated``. The rest of the chunk is not
    executed: there ``valid`` is false and every other entry is zero.
    cost: float32 ``[B, C]``, the number of safety limits that changed each action; None: there are
    no limits. fault: uint8 ``[B, C]``, index in ``FAULTS`` of what cut the episode in this step.
    """

    observation: Observation
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    success: Tensor
    valid: Tensor
    cost: Tensor | None = None
    fault: Tensor | None = None

    @property
    def done(self) -> Tensor:
        """bool ``[B]``: whether the episode ended in this chunk."""
        return (self.terminated | self.truncated).any(dim=1)

    @property
    def outcome(self) -> Tensors:
        """All but the observation, by name; without those that are None."""
        values = {
            name: getattr(self, name)
            for name in ("reward", "terminated", "truncated", "success", "valid", "cost", "fault")
        }
        return {name: value for name, value in values.items() if value is not None}

    @property
    def failed(self) -> Tensor:
        """Whether the simulator failed in the episode, bool ``[B]``."""
        return torch.zeros_like(self.valid[:, 0]) if self.fault is None else (self.fault > 0).any(1)

    def outcome_to(self, device: torch.device) -> StepResult:
        """Return the result with all but the observation on ``device``, moved in one copy."""
        outcome: dict[str, Any] = moved(self.outcome, device)
        return replace(self, **outcome)


def last_true(flags: Tensor) -> Tensor:
    """Return which entry of each row is its last true one, bool ``[B, C]`` as ``flags``."""
    return flags & (flags.cumsum(1) == flags.sum(1, keepdim=True))


@dataclass(frozen=True)
class ActionSample:
    """An action chunk sampled from a policy for each environment.

    actions: float32 ``[B, C, D]`` in the environment's units.
    latent: the data from which ``Policy.evaluate`` recomputes the log-probability of this sample
        (token ids, a denoising chain), leading dimension ``B``.
    log_prob: float32 ``[B, C, D]``, at the finest granularity that the policy has.
    value: float32 ``[B]``, the critic's estimate of the return from this observation.
    """

    actions: Tensor
    latent: dict[str, Tensor]
    log_prob: Tensor
    value: Tensor


@dataclass(frozen=True)
class ActionEval:
    """An action sample evaluated under the current weights.

    log_prob and entropy: float32 ``[B, C, D]``. value: float32 ``[B]``.
    """

    log_prob: Tensor
    entropy: Tensor
    value: Tensor


@dataclass(frozen=True)
class Trajectory(Batched):
    """``T`` policy calls in ``B`` environments.

    Nothing depends on positions: masks, returns and statistics derive from these fields.

    Per call ``[T, B, ...]``: inputs, latent, log_prob ``[T, B, C, D]``, value, policy_version, and
    its episode: task_id, seed, attempt, step (control steps already executed in that episode).
    cut ``[T, B]``: bool, cut after the call (truncated, rollout ended; or ``bootstrap=always``).
    bootstrap_value ``[T, B]``: where ``cut``, the critic's estimate for the observation after the
    call; zero elsewhere.
    Per control step ``[T, B, C]``: reward, terminated, truncated, success, valid.
    reference ``[T, B, C, D]``: log-probabilities of the actions under the reference policy of the
    KL penalty; None where they are not computed. cost and fault ``[T, B, C]``: see ``StepResult``.
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
    cost: Tensor | None = None
    fault: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """``(T, B)``."""
        return self.value.shape[0], self.value.shape[1]

    def __len__(self) -> int:
        return len(self.value)

    def episode_ids(self) -> Tensor:
        """Return the episode index of each call: int64, 0 ... E-1, in the shape of ``seed``."""
        return _numbered(self.task_id, self.seed, self.attempt)

    def group_ids(self) -> Tensor:
        """Return the group index of each call. A group is all attempts at one episode."""
        return _numbered(self.task_id, self.seed)

    def group_of_episode(self) -> Tensor:
        """Return the group index of each episode, int64 ``[E]``."""
        episode, group = self.episode_ids().flatten(), self.group_ids().flatten()
        return group.new_zeros(int(episode.max()) + 1 if len(episode) else 0).index_put(
            (episode,), group
        )

    def episode_success(self) -> Tensor:
        """Return whether each episode succeeded at least once, bool ``[E]``."""
        episode = self.episode_ids().flatten()
        success = (self.success & self.valid).any(-1).flatten()
        return (
            torch.zeros(len(self.group_of_episode()), device=success.device).index_add(
                0, episode, success.float()
            )
            > 0
        )

    def flatten(self) -> Trajectory:
        """Return the calls as one batch: every field ``[T * B, ...]``."""
        return mapped(lambda x: x.flatten(0, 1), self)

    @staticmethod
    def stack(calls: Sequence[Trajectory]) -> Trajectory:
        """Stack ``T`` single calls with fields ``[B, ...]`` into one trajectory ``[T, B, ...]``."""
        return mapped(lambda *xs: torch.stack(xs), *calls)


def _numbered(*keys: Tensor) -> Tensor:
    return torch.unique(torch.stack(keys, dim=-1).flatten(0, -2), dim=0, return_inverse=True)[
        1
    ].reshape(keys[0].shape)


Rollouts = Iterable[Trajectory]
"""Shards in a fixed order, each yielded once it is complete; can be iterated repeatedly. A shard
holds ``[T, B]`` calls of some of the environments, or ``[N]`` calls of some of the episodes."""


def gather(rollouts: Rollouts) -> Trajectory:
    """Concatenate all shards into one trajectory; waits for the last shard."""
    shards = list(rollouts)
    return shards[0] if len(shards) == 1 else Trajectory.cat(shards, dim=shards[0].value.ndim - 1)


def flattened(shard: Trajectory) -> Trajectory:
    """Return the calls of either kind of shard as ``[N]``."""
    return shard.flatten() if shard.value.ndim == 2 else shard


def fault(tensor: Tensor) -> str | None:
    """Return what is wrong with a weight of a file, as a phrase that follows its name, or None."""
    if tensor.dtype not in FLOATS:
        return f"holds {str(tensor.dtype).removeprefix('torch.')}, quantised weights are not supported: convert them to bfloat16"
    # aminmax propagates NaN and, unlike isfinite, allocates no tensor of the same size
    if tensor.numel() and not all(bound.isfinite() for bound in tensor.aminmax()):
        return "holds NaN or infinite values, the file is damaged: copy it again"
    return None

"""Which seeds are for what. Training, evaluation and demonstrations never share an episode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlinf_vla.rollout.noise import philox
from rlinf_vla.types import MAX_TASKS, Episodes, UserError

EVALUATION_SEEDS = range(1 << 20)
DEMONSTRATION_SEEDS = range(1 << 20, 1 << 24)
TRAINING_SEEDS = range(1 << 24, 1 << 32)


def training_episodes(run_seed: int, iteration: int, slot: Tensor, ordinal: Tensor, num_tasks: int) -> Episodes:
    """The ``ordinal``-th episode of environment ``slot`` in an iteration; ``slot``, ``ordinal``: int64 ``[B]``."""
    zero = torch.zeros_like(slot)
    _check(num_tasks)
    words = philox((ordinal, slot, zero + iteration, zero), (run_seed & 0xFFFFFFFF, 0x5EED))
    seeds = TRAINING_SEEDS.start + words[0] % len(TRAINING_SEEDS)
    return Episodes.first_attempts(words[1] % num_tasks, seeds)


def task_episodes(task: int, seeds: Sequence[int]) -> Episodes:
    """One task's episodes of these seeds."""
    seed = torch.tensor(seeds, dtype=torch.int64)
    return Episodes.first_attempts(torch.full_like(seed, task), seed)


def numbered_episodes(seeds: range, first: int, count: int, num_tasks: int) -> Episodes:
    """``count`` episodes of a fixed list: tasks in turn, and the ``k``-th episode of every task has seed ``seeds[k]``.

    (A benchmark with stored initial states plays the ``k``-th of them there.) Raises IndexError past the end of the range.
    """
    _check(num_tasks)
    index = torch.arange(first, first + count)
    if -(-(first + count) // num_tasks) > len(seeds):
        raise IndexError(f"only {len(seeds)} seeds are reserved for each of {num_tasks} tasks, asked for {first + count} episodes")
    return Episodes.first_attempts(index % num_tasks, seeds.start + index // num_tasks)


def _check(num_tasks: int) -> None:
    if num_tasks > MAX_TASKS:
        raise UserError(f"the environment has {num_tasks} tasks: at most {MAX_TASKS} have random numbers of their own; choose some of them")

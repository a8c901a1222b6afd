"""Assign seeds to episodes: training, evaluation and demonstrations never share an episode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.tasks import EVALUATION_SEEDS
from rlinf_vla.core.types import MAX_TASKS, Episodes
from rlinf_vla.rollout.noise import philox

DEMONSTRATION_SEEDS = range(EVALUATION_SEEDS.stop, 1 << 24)
TRAINING_SEEDS = range(1 << 24, 1 << 32)


def training_episodes(
    run_seed: int, iteration: int, slot: Tensor, ordinal: Tensor, num_tasks: int
) -> Episodes:
    """Return each environment's ``ordinal``-th episode; ``slot``, ``ordinal``: int64 ``[B]``."""
    zero = torch.zeros_like(slot)
    _check(num_tasks)
    words = philox((ordinal, slot, zero + iteration, zero), (run_seed & 0xFFFFFFFF, 0x5EED))
    seeds = TRAINING_SEEDS.start + words[0] % len(TRAINING_SEEDS)
    return Episodes.first_attempts(words[1] % num_tasks, seeds)


def drawn_episodes(
    run_seed: int, iteration: int, count: int, draw: int, num_tasks: int
) -> Episodes:
    """Draw ``count`` new training episodes of an iteration; each ``draw`` gives others."""
    slots = torch.arange(count)
    return training_episodes(run_seed, iteration, slots, torch.full_like(slots, draw), num_tasks)


def task_episodes(task: int, seeds: Sequence[int]) -> Episodes:
    """Return one task's episodes with these seeds."""
    seed = torch.tensor(seeds, dtype=torch.int64)
    return Episodes.first_attempts(torch.full_like(seed, task), seed)


def numbered_episodes(seeds: range, first: int, count: int, num_tasks: int) -> Episodes:
    """Return ``count`` episodes of a fixed list that alternates between tasks.

    The ``k``-th episode of every task has seed ``seeds[k]``; a benchmark with stored initial states
    uses the ``k``-th of them. Raises IndexError past the end of the range.
    """
    _check(num_tasks)
    index = torch.arange(first, first + count)
    if -(-(first + count) // num_tasks) > len(seeds):
        raise IndexError(
            f"only {len(seeds)} seeds are reserved for each of {num_tasks} tasks, asked for {first + count} episodes"
        )
    return Episodes.first_attempts(index % num_tasks, seeds.start + index // num_tasks)


def _check(num_tasks: int) -> None:
    if num_tasks > MAX_TASKS:
        raise UserError(
            f"the environment has {num_tasks} tasks: at most {MAX_TASKS} are supported; select a subset"
        )

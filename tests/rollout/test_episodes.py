from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.core.tasks import EVALUATION_SEEDS
from rlinf_vla.core.types import Episodes
from rlinf_vla.rollout.episodes import (
    DEMONSTRATION_SEEDS,
    TRAINING_SEEDS,
    numbered_episodes,
    training_episodes,
)

SLOTS = torch.arange(16)


def training(
    run_seed: int = 0,
    iteration: int = 0,
    ordinal: int = 0,
    tasks: int = 3,
    slots: torch.Tensor = SLOTS,
) -> Episodes:
    return training_episodes(run_seed, iteration, slots, torch.full_like(slots, ordinal), tasks)


def test_training_evaluation_and_demonstrations_share_no_seed() -> None:
    ranges = sorted(
        [EVALUATION_SEEDS, DEMONSTRATION_SEEDS, TRAINING_SEEDS], key=lambda each: each.start
    )
    assert ranges[0].start >= 0 and ranges[-1].stop <= 2**32
    assert all(before.stop <= after.start for before, after in pairwise(ranges))
    assert all(len(each) > 10_000 and each.step == 1 for each in ranges)


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(0, 1000), st.integers(1, 40))
def test_training_episodes_are_deterministic_and_in_range(
    run_seed: int, iteration: int, ordinal: int, tasks: int
) -> None:
    episodes = training(run_seed, iteration, ordinal, tasks)
    assert len(episodes) == 16
    assert all(seed in TRAINING_SEEDS for seed in episodes.seed.tolist())
    assert (episodes.task_id >= 0).all() and (episodes.task_id < tasks).all()
    alone = training(run_seed, iteration, ordinal, tasks, slots=torch.tensor([11]))
    assert (alone.seed[0], alone.task_id[0]) == (episodes.seed[11], episodes.task_id[11]), (
        "other slots do not matter"
    )


def test_iterations_slots_ordinals_and_runs_have_different_episodes() -> None:
    seeds = torch.cat(
        [training(run, i, o).seed for run in (0, 1) for i in range(8) for o in range(4)]
    )
    assert len(seeds.unique()) == len(seeds)


def test_all_tasks_are_trained() -> None:
    tasks = torch.cat([training(iteration=i).task_id for i in range(60)])
    assert torch.bincount(tasks, minlength=3).min() > 0.8 * len(tasks) / 3


def test_numbered_episodes_are_one_list() -> None:
    whole = numbered_episodes(EVALUATION_SEEDS, 0, 10, 3)
    assert whole.task_id.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert whole.seed.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3], (
        "the k-th episode of each task has the k-th seed"
    )
    part = numbered_episodes(EVALUATION_SEEDS, 4, 3, 3)
    assert torch.equal(part.seed, whole[4:7].seed) and torch.equal(part.task_id, whole[4:7].task_id)


def test_numbered_episodes_end_with_their_range() -> None:
    assert numbered_episodes(range(5, 8), 0, 3, 1).seed.tolist() == [5, 6, 7]
    with pytest.raises(IndexError, match="only 3 seeds"):
        numbered_episodes(range(5, 8), 1, 3, 1)
    assert numbered_episodes(range(5, 8), 0, 9, 3).seed.tolist() == [5, 5, 5, 6, 6, 6, 7, 7, 7]
    with pytest.raises(IndexError, match="only 3 seeds"):
        numbered_episodes(range(5, 8), 0, 10, 3)

"""Distribution of rows over several ranks."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rlinf_vla.training import ranks
from rlinf_vla.training.ranks import (
    LEAST,
    Division,
    Rows,
    buckets,
    map_rows,
    micro_batches,
    minibatches,
    rows_of_rank,
    sum_gradients,
    summed,
)
from tests.training.processes import on_ranks
from tests.training.test_trainer import rows


def as_rank(rank: int, world: int) -> mock._patch:
    return mock.patch.multiple(ranks, rank=lambda: rank, world_size=lambda: world)


@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 8))
def test_each_row_has_one_rank_and_all_ranks_make_the_same_passes(
    count: int, size: int, world: int
) -> None:
    found = []
    passes = set()
    for rank in range(world):
        with as_rank(rank, world):
            parts = list(micro_batches(torch.arange(count), size))
        found += [row for part, counted in parts if counted for row in part.tolist()]
        passes.add(len(parts))
        assert all(0 < len(part) <= size for part, _ in parts)
    assert sorted(found) == list(range(count))
    assert passes == {math.ceil(math.ceil(count / world) / size)}


@given(st.integers(1, 30), st.integers(1, 9), st.lists(st.floats(0.0, 1.0), min_size=2, max_size=5))
def test_a_rank_computes_its_share_in_as_few_passes_as_it_needs(
    count: int, size: int, weights: list[float]
) -> None:
    total = sum(weights) + 1.0
    shares = [weight / total for weight in [*weights, 1.0]]
    found = []
    for rank, share in enumerate(shares):
        with as_rank(rank, len(shares)):
            parts = list(micro_batches(torch.arange(count), size, division=Division(shares)))
        mine = [row for part, counted in parts if counted for row in part.tolist()]
        assert abs(len(mine) - count * share) < 1.0 + 1e-9
        assert len(parts) == max(1, math.ceil(len(mine) / size))
        found += mine
    assert found == list(range(count))


@given(st.integers(1, 20), st.integers(1, 7), st.integers(1, 4), st.integers(1, 5))
def test_a_rank_reads_only_the_rows_that_it_computes(
    count: int, minibatch: int, size: int, world: int
) -> None:
    parts = minibatches(count, 2, minibatch, seed=3)
    for rank in range(world):
        with as_rank(rank, world):
            computed = {
                row
                for order in parts
                for part, _ in micro_batches(order, size)
                for row in part.tolist()
            }
            assert rows_of_rank(parts, size).tolist() == sorted(computed)
    with as_rank(0, 1):
        assert rows_of_rank(parts, size).tolist() == list(range(count))


@given(
    st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 9)
)
def test_with_row_groups_a_rank_keeps_its_rows(
    count: int, world: int, multiple: int, per_group: int, seed: int
) -> None:
    """Every epoch has every row once, in another order, and a rank has the same rows in each."""
    groups = world * multiple
    parts = minibatches(count, 3, per_group * groups, seed, groups)
    per_epoch = len(parts) // 3
    epochs = [
        torch.cat(parts[first : first + per_epoch]) for first in (0, per_epoch, 2 * per_epoch)
    ]
    for epoch in epochs:
        assert epoch.sort().values.tolist() == list(range(count))
        assert torch.equal(epoch % groups, torch.arange(count) % groups), (
            "each group has its share of each minibatch"
        )
    for rank in range(world):
        with as_rank(rank, world):
            mine = [
                sorted(
                    row
                    for part, counts in micro_batches(epoch, 2)
                    if counts
                    for row in part.tolist()
                )
                for epoch in epochs
            ]
        assert mine[0] == mine[1] == mine[2] == list(range(rank, count, world))


def test_row_groups_are_shuffled() -> None:
    orders = [torch.cat(minibatches(24, 2, 4, seed, 4)).tolist() for seed in (1, 2)]
    assert len({tuple(half) for order in orders for half in (order[:24], order[24:])}) == 4


def test_rows_are_a_batch() -> None:
    batch = rows(9)
    index = torch.tensor([5, 1, 7, 1])
    chosen = Rows(batch, index)
    assert len(chosen) == 4
    assert torch.equal(chosen.counts, batch[index].counts)
    assert torch.equal(chosen[1::2].x, batch[index].x[1::2])


@pytest.mark.parametrize("count", [1, 4, 7])
def test_three_ranks_equal_one(tmp_path: Path, count: int) -> None:
    """With one row, two ranks have none."""
    numbers = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    calls: list[int] = []

    def square(part: Tensor) -> Tensor:
        calls.append(len(part))
        return part**2

    def work(rank: int) -> dict[str, object]:
        full, half, still = (
            nn.Parameter(torch.zeros(3, 2, dtype=dtype))
            for dtype in (torch.float32, torch.bfloat16, torch.float32)
        )
        for parameter in (full, half):
            parameter.grad = torch.full_like(parameter, rank + 1)
        whole = nn.Parameter(torch.zeros(3, 2))
        whole.grad = torch.full((2, 3), rank + 1.0).T  # not contiguous
        sum_gradients([full, half, still, whole], bucket=0)
        packed = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(2))
        for parameter in packed:
            parameter.grad = torch.full_like(parameter, 2.0 * rank)
        sum_gradients(packed)
        found = {
            "rows": map_rows(square, numbers, 2),
            "calls": len(calls),
            "still": still.grad is None,
        }
        found |= summed({"number": torch.tensor(1.5 + rank), "nothing": torch.tensor(0)})
        return found | {
            "full": full.grad,
            "half": half.grad,
            "whole": whole.grad,
            "packed": [each.grad for each in packed],
        }

    for found in on_ranks(work, tmp_path, 3):
        assert torch.equal(found["rows"], numbers**2)
        assert found["calls"] == math.ceil(math.ceil(count / 3) / 2) and found["still"]
        assert found["number"] == 7.5 and found["nothing"] == 0
        assert all(torch.equal(each, torch.full_like(each, 6)) for each in found["packed"])
        for name, dtype in (
            ("full", torch.float32),
            ("half", torch.bfloat16),
            ("whole", torch.float32),
        ):
            assert torch.equal(found[name], torch.full((3, 2), 6, dtype=dtype))
    assert torch.equal(map_rows(square, numbers, 2), numbers**2)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12), st.integers(0, 40))
def test_buckets_of_gradients(sizes: list[tuple[int, bool]], limit: int) -> None:
    """Every gradient is in one bucket, of its dtype; neighbours that fit together are in one collective."""
    gradients = [
        torch.full((size,), number, dtype=torch.bfloat16 if half else torch.float32)
        for number, (size, half) in enumerate(sizes)
    ]
    found = list(buckets(gradients, limit))
    assert sorted(map(id, (each for bucket in found for each in bucket))) == sorted(
        map(id, gradients)
    )
    for dtype in (torch.float32, torch.bfloat16):
        of = [bucket for bucket in found if bucket[0].dtype == dtype]
        assert all({each.dtype for each in bucket} == {dtype} for bucket in of)
        assert all(
            len(bucket) == 1 or sum(each.nbytes for each in bucket) <= limit for bucket in of
        )
        assert all(
            sum(each.nbytes for each in first) + second[0].nbytes > limit
            for first, second in pairwise(of)
        )


@pytest.mark.parametrize(("count", "size"), [(13, 6), (2, 8), (3, 1), (8, 4)])
def test_remaining_rows_are_computed_in_batches_of_a_minimum_size(count: int, size: int) -> None:
    numbers = torch.arange(float(count))
    seen = list[int]()

    def square(part: Tensor) -> Tensor:
        seen.append(len(part))
        return part**2

    assert torch.equal(map_rows(square, numbers, size), numbers**2)
    assert min(seen) >= LEAST and max(seen) <= max(size, LEAST)

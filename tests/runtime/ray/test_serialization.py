"""Trainer ranks read the heavy parts of shards where they are stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_vla.core.types import Trajectory, flattened
from rlinf_vla.features.planner import synthetic
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.runtime.workers.shards import (
    HeavyParts,
    Packed,
    heavy_parts,
    light_part,
    light_trajectory,
)
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy

SIZES = (3, 1, 5)


def shard(number: int, size: int) -> Trajectory:
    calls = synthetic.calls(
        LinearPolicy(LinearOptions()), size, Settings(number, 1.0, size, False), 1
    )
    half = torch.arange(size).bfloat16() + 10 * number
    return replace(
        calls,
        inputs={
            "image": calls.inputs["image"] + number,
            "half": half,
            "ids": torch.randint(0, 9, (size, 2, 3)),
        },
    )


@pytest.fixture
def stored() -> tuple[Trajectory, Trajectory, HeavyParts]:
    """The calls of all shards, and their light parts with the heavy ones."""
    shards = [shard(number, size) for number, size in enumerate(SIZES)]
    parts = HeavyParts()
    for number, each in enumerate(shards):
        parts.add(10 + number, heavy_parts(each)[0])
    light = [light_trajectory(light_part(each), 10 + number) for number, each in enumerate(shards)]
    return Trajectory.cat(shards), Trajectory.cat(light), parts


def same(found: Trajectory, expected: Trajectory) -> None:
    assert (
        found.inputs.keys() == expected.inputs.keys()
        and found.latent.keys() == expected.latent.keys()
    )
    for one, other in zip(found.tensors(), expected.tensors(), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize(
    "index",
    [
        slice(None),
        slice(1, 8, 3),
        torch.tensor([8, 0, 8, 3]),
        [4, 2],
        torch.arange(9) % 2 == 0,
        torch.empty(0, dtype=torch.int64),
    ],
    ids=str,
)
def test_an_index_selects_the_same_rows_as_of_one_tensor(
    stored: tuple[Trajectory, Trajectory, HeavyParts], index: Any
) -> None:
    whole, light, parts = stored
    completed = parts.complete(light)
    assert all(len(each) == len(whole) for each in completed.inputs.values())
    same(completed[index], whole[index])
    shuffled = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    same(parts.complete(light[shuffled])[index], whole[shuffled][index])


def test_a_shard_of_time_steps_is_flattened() -> None:
    calls = shard(0, 6)
    steps = replace(calls, **{name: _steps(value) for name, value in vars(calls).items()})
    parts = HeavyParts()
    parts.add(0, heavy_parts(steps)[0])
    same(parts.complete(flattened(light_trajectory(light_part(steps), 0)))[:], calls)


def _steps(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _steps(each) for name, each in value.items()}
    return value if value is None else value.unflatten(0, (3, 2))


def test_the_parts_are_read_and_not_copied() -> None:
    """A completed batch shows a change of the stored memory, until the part is forgotten."""
    calls = shard(0, 4)
    image: Tensor = calls.inputs["image"].clone()
    parts = HeavyParts()
    parts.add(0, Packed({"inputs.image": image.numpy()}))
    completed = parts.complete(light_trajectory(light_part(calls), 0))
    image += 1
    assert torch.equal(completed.inputs["image"][1:2], calls.inputs["image"][1:2] + 1)
    parts.forget([0, 7])
    with pytest.raises(KeyError):
        parts.complete(light_trajectory(light_part(calls), 0))

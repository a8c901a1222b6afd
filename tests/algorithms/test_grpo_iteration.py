"""Which groups an iteration of GRPO draws, uses and excludes, with given outcomes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_vla.algorithms.grpo import GRPO, GRPOConfig, groups_of
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.types import Trajectory

ATTEMPTS = 4
CONFIG = GRPOConfig(episodes=12, group_size=ATTEMPTS, minibatch_size=5, target_kl=None)


def group(seed: int, won: int) -> Trajectory:
    """Four attempts at an episode, a call each, of which the first ``won`` succeed and earn 1."""
    seeds = torch.full((ATTEMPTS,), seed)
    zeros = torch.zeros(ATTEMPTS, dtype=torch.int64)
    success = (torch.arange(ATTEMPTS) < won)[:, None]
    nothing = torch.zeros_like(success)
    return Trajectory(
        inputs={"image": torch.zeros(ATTEMPTS, 1)},
        latent={},
        log_prob=torch.zeros(ATTEMPTS, 1, 1),
        value=torch.zeros(ATTEMPTS),
        bootstrap_value=torch.zeros(ATTEMPTS),
        cut=torch.zeros(ATTEMPTS, dtype=torch.bool),
        reward=success.float(),
        terminated=~nothing,
        truncated=nothing,
        success=success,
        valid=~nothing,
        task_id=zeros,
        seed=seeds,
        attempt=torch.arange(ATTEMPTS),
        step=zeros,
        policy_version=zeros,
    )


class Given:
    """A flow with given numbers of successful attempts per group. ``moved``: updates until the policy exceeds target_kl."""

    iteration = 0

    def __init__(self, draws: list[list[int]], moved: int = 1000) -> None:
        self.draws = draws
        self.moved = moved
        self.asked: list[int] = []
        self.learnt: list[list[int]] = []
        self.batches: list[Any] = []
        self.metrics: dict[str, float] = {}
        self.published = 0

    def collect_groups(self, groups: int, attempts: int, draw: int) -> list[Trajectory]:
        assert attempts == ATTEMPTS
        self.asked.append(groups)
        return [
            Trajectory.cat(
                [group(100 * draw + i, won) for i, won in enumerate(self.draws[draw])], dim=0
            )
        ]

    def score(self, rollouts: Any) -> Any:
        return rollouts

    def update(self, batch: Any, algorithm: Any) -> bool:
        self.batches.append(batch)
        self.learnt.append(sorted(set(batch.calls.seed.tolist())))
        return len(self.learnt) >= self.moved

    def publish(self) -> None:
        self.published += 1

    def log(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics


def iterate(draws: list[list[int]], moved: int = 1000, **changes: Any) -> Given:
    flow = Given(draws, moved)
    GRPO(replace(CONFIG, **changes), 1.0).iteration(flow)  # type: ignore[arg-type]
    assert flow.published == 1
    return flow


@pytest.mark.parametrize(("moved", "steps"), [(1, [[0]]), (2, [[0], [1]]), (9, [[0], [1], [2]])])
def test_target_kl_stops_the_updates_of_an_iteration(moved: int, steps: list[list[int]]) -> None:
    flow = iterate([[1, 2, 3]], moved, groups_per_step=1)
    assert flow.learnt == steps
    assert flow.metrics == {"grpo/groups": 3, "grpo/frac_informative": 1}, (
        "the groups are still drawn and counted"
    )


@pytest.mark.parametrize(("moved", "steps"), [(1, [[0, 1]]), (9, [[0, 1], [2]])])
def test_target_kl_also_stops_the_remaining_groups(moved: int, steps: list[list[int]]) -> None:
    assert iterate([[1, 2, 3]], moved, groups_per_step=2).learnt == steps


def test_all_groups_are_one_batch_without_groups_per_step() -> None:
    flow = iterate([[1, 2, 3]])
    assert flow.learnt == [[0, 1, 2]]
    algorithm = GRPO(CONFIG, 1.0)
    assert algorithm.minibatch_size(flow.batches[0]) == 5
    assert GRPO(replace(CONFIG, groups_per_step=2), 1.0).minibatch_size(flow.batches[0]) == 12


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ([0.25, 0.75], [0, 1, 2]),
        ([0.25, 0.5], [0, 1]),
        ([0.5, 0.5], [1]),
        ([0.26, 0.74], [1]),
        ([0.5, 1.0], [1, 2]),
    ],
)
def test_a_range_of_success_rates_includes_its_bounds(bounds: list[float], kept: list[int]) -> None:
    assert iterate([[1, 2, 3]], success_range=bounds).learnt == [kept]


def test_a_success_range_also_requires_different_returns() -> None:
    assert iterate([[0, 2, 4]], success_range=[0.0, 1.0]).learnt == [[1]]


def test_new_groups_replace_uninformative_groups() -> None:
    flow = iterate([[0, 2, 4], [1, 4], [3]], resample=5)
    assert flow.asked == [3, 2, 1] and flow.learnt == [[1, 100, 200]]
    assert flow.metrics == {"grpo/groups": 6, "grpo/frac_informative": 0.5}
    assert iterate([[0, 2, 4], [1, 4]], resample=1).learnt == [[1, 100]]
    assert iterate([[0, 2, 4]]).asked == [3]


def test_uninformative_groups_count_in_the_denominators_if_told() -> None:
    """With an advantage of 0, those outside the range of success rates, too."""
    dropped, counted = (
        iterate([[0, 1, 2, 4]], success_range=[0.4, 0.6], uninformative=kind)
        for kind in ("dropped", "counted")
    )
    assert (dropped.learnt, counted.learnt) == ([[2]], [[0, 1, 2, 3]])
    batch, alone = counted.batches[0], dropped.batches[0]
    of_second = batch.calls.seed == 2
    assert not batch.advantage[~of_second].any() and torch.equal(
        batch.advantage[of_second], alone.advantage
    )
    assert torch.equal(batch.weight.bool(), torch.ones(len(batch)).bool()), (
        "each call has a share of the mean"
    )
    assert len(batch) == 4 * len(alone)
    with pytest.raises(
        UserError,
        match=r"algorithm.resample replaces the groups that algorithm.uninformative=counted keeps",
    ):
        GRPO(replace(CONFIG, uninformative="counted", resample=1), 1.0)


def normalised(won: int) -> list[float]:
    """Returns of 1 and 0, less their mean, by their standard deviation."""
    rate = won / ATTEMPTS
    std = (rate * (1 - rate)) ** 0.5
    return [((i < won) - rate) / std for i in range(ATTEMPTS)]


def test_advantages_are_relative_to_the_group() -> None:
    flow = iterate([[1, 2, 3]])
    found: Tensor = flow.batches[0].advantage
    assert found.tolist() == pytest.approx(
        [*normalised(1), *normalised(2), *normalised(3)], abs=1e-4
    )


def test_groups_are_identified_by_task_and_seed() -> None:
    calls = [
        group(7, 1),
        replace(group(7, 2), task_id=torch.ones(ATTEMPTS, dtype=torch.int64)),
        group(8, 3),
    ]
    found = list(groups_of([Trajectory.cat(calls[:2], dim=0), calls[2]]))
    assert [
        (int(each.task_id[0]), int(each.seed[0]), int(each.success.sum())) for each in found
    ] == [(0, 7, 1), (1, 7, 2), (0, 8, 3)]
    assert all(len(each) == ATTEMPTS for each in found)

"""Batches of imitation: chunks of an episode's actions, and separate random numbers for each step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.algorithms.sft import SFT, Demonstrations, SFTConfig, action_chunks, warmup_cosine


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunks_start_with_the_action_of_their_state_and_repeat_the_last(chunk: int) -> None:
    actions = torch.arange(10.0).reshape(5, 2)
    expected = [[actions[min(i + j, 4)].tolist() for j in range(chunk)] for i in range(5)]
    assert action_chunks(actions, chunk).tolist() == expected


def test_chunks_do_not_reach_into_the_next_episode() -> None:
    episodes = [
        ({"x": torch.zeros(3, 1)}, torch.arange(3.0)[:, None]),
        ({"x": torch.ones(2, 1)}, torch.tensor([[10.0], [11.0]])),
    ]
    shown = Demonstrations.of(episodes, 2)
    assert shown.actions[..., 0].tolist() == [[0, 1], [1, 2], [2, 2], [10, 11], [11, 11]]
    assert shown.inputs["x"].flatten().tolist() == [0, 0, 0, 1, 1] and shown.draws.tolist() == list(
        range(5)
    )


SIZES, WEIGHTS = (5, 50, 500), (0.7, 0.2, 0.1)
"""Rows and weights of three datasets."""


def mixture() -> Demonstrations:
    """The input of a row is its number."""
    each = [
        torch.full((size,), weight / size, dtype=torch.float64)
        for size, weight in zip(SIZES, WEIGHTS, strict=True)
    ]
    count = sum(SIZES)
    rows = torch.arange(count)
    return Demonstrations({"x": rows}, torch.zeros(count, 1, 1), rows, torch.cat(each))


def test_a_row_is_of_the_dataset_in_whose_part_of_the_unit_interval_its_number_is() -> None:
    drawn = mixture().draw(1000, torch.Generator().manual_seed(3))
    numbers = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert drawn.weight is None and torch.equal(drawn.draws, drawn.inputs["x"])
    found = np.searchsorted(np.cumsum(SIZES), drawn.inputs["x"].numpy(), side="right")
    assert (found == np.searchsorted([0.7, 0.9], numbers.numpy(), side="right")).all()


@pytest.mark.parametrize("seed", [0, 1])
def test_datasets_are_drawn_by_weight_and_rows_of_a_dataset_alike(seed: int) -> None:
    """Below the 99.9 % quantiles of chi-square with 2, 4 and 49 degrees of freedom."""
    count = 40_000
    drawn = mixture().draw(count, torch.Generator().manual_seed(seed)).inputs["x"]
    times = np.bincount(drawn.numpy(), minlength=sum(SIZES))
    parts = np.split(times, np.cumsum(SIZES)[:-1])

    def chi_square(found: np.ndarray, expected: np.ndarray | float) -> float:
        return float(((found - expected) ** 2 / expected).sum())

    assert chi_square(np.array([part.sum() for part in parts]), count * np.array(WEIGHTS)) < 13.8
    for part, limit in zip(parts[:2], (18.5, 85.4), strict=True):
        assert chi_square(part, part.sum() / len(part)) < limit


def test_without_weights_rows_are_drawn_as_ever() -> None:
    whole = mixture()
    drawn = replace(whole, weight=None).draw(9, torch.Generator().manual_seed(3))
    rows = torch.randint(len(whole), (9,), generator=torch.Generator().manual_seed(3))
    assert torch.equal(drawn.inputs["x"], rows)


class Flow:
    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.batch: Demonstrations | None = None
        self.rate = -1.0

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.iteration)

    def demonstrate(self, config: DemonstrationConfig, augmented: bool) -> Demonstrations:
        assert not augmented
        return Demonstrations({"x": torch.arange(50)}, torch.zeros(50, 1, 1), torch.arange(50))

    def fit(self, batch: Demonstrations, rate: float) -> None:
        self.batch = batch
        self.rate = rate

    def log(self, metrics: dict[str, float]) -> None:
        assert metrics == {"sft/learning_rate": self.rate * SFTConfig().learning_rate}


def test_no_two_rows_of_a_run_share_their_random_numbers() -> None:
    draws: list[int] = []
    states = set()
    for iteration in range(5):
        flow = Flow(iteration)
        SFT(SFTConfig(batch_size=8, warmup_steps=2), iterations=10).iteration(flow)
        assert flow.batch is not None and flow.rate == warmup_cosine(iteration, 2, 10)
        draws += flow.batch.draws.tolist()
        states.add(tuple(flow.batch.inputs["x"].tolist()))
    assert len(set(draws)) == 40 and len(states) == 5

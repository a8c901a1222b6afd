"""Batches of imitation: chunks of an episode's actions, and separate random numbers for each step."""

from __future__ import annotations

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

    def imitate(self, batch: Demonstrations, rate: float) -> None:
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

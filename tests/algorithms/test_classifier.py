from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.algorithms.classifier import (
    ClassifierConfig,
    ClassifierTraining,
    Frames,
    balanced,
)
from rlinf_vla.algorithms.sft import Draws
from rlinf_vla.config.errors import UserError

NONE = Draws(lambda draws: None, lambda draws: None)


def frames(lengths: list[int], successes: list[int]) -> Frames:
    """Episodes of these lengths; the last ``successes`` frames of each show success."""
    success = torch.cat(
        [
            torch.arange(length) >= length - shown
            for length, shown in zip(lengths, successes, strict=True)
        ]
    )
    episode = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])
    return Frames({"x": torch.arange(len(success)).float()[:, None]}, success, episode)


@given(st.lists(st.integers(2, 6), min_size=2, max_size=12), st.floats(0.1, 0.9))
def test_complete_episodes_are_held_out(lengths: list[int], share: float) -> None:
    held = round((1 - share) * len(lengths))
    algorithm = ClassifierTraining(ClassifierConfig(held_out=share), 10)
    shown = frames(lengths, [1] * len(lengths))
    if held in (0, len(lengths)):
        with pytest.raises(UserError, match="both classes are needed"):
            algorithm.split(shown)
        return
    learnt, held_out = algorithm.split(shown)
    assert sorted([*learnt.tolist(), *held_out.tolist()]) == list(range(len(shown)))
    assert set(shown.episode[learnt].tolist()) == set(range(held)) and set(
        shown.episode[held_out].tolist()
    ) == set(range(held, len(lengths)))


@pytest.mark.parametrize("successes", [[0, 0, 0, 0], [1, 1, 1, 0], [3, 3, 3, 3]])
def test_both_labels_are_required_in_both_splits(successes: list[int]) -> None:
    with pytest.raises(UserError, match="both classes are needed"):
        ClassifierTraining(ClassifierConfig(held_out=0.25), 10).split(
            frames([3, 3, 3, 3], successes)
        )


def test_every_other_row_shows_success() -> None:
    success = torch.zeros(50, dtype=torch.bool)
    success[[7, 30]] = True
    rows = balanced(success, 21, torch.Generator().manual_seed(0))
    assert success[rows].tolist() == [i % 2 == 0 for i in range(21)]
    assert set(rows[::2].tolist()) == {7, 30}


def test_the_loss_is_cross_entropy() -> None:
    class Given(nn.Module):
        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            return inputs["x"][:, 0]

    logits = [2.0, -1.0, 0.5]
    success = [True, True, False]
    batch = Frames({"x": torch.tensor(logits)[:, None]}, torch.tensor(success), torch.zeros(3))
    loss, statistics = ClassifierTraining(ClassifierConfig(), 10).loss(Given(), batch, NONE)
    chances = [1 / (1 + math.exp(-logit)) for logit in logits]
    expected = -sum(
        math.log(chance if shown else 1 - chance)
        for chance, shown in zip(chances, success, strict=True)
    )
    assert float(loss) == pytest.approx(expected) and float(statistics["classifier/accuracy"]) == 1


def test_an_iteration_learns_from_a_balanced_batch_of_training_frames() -> None:
    shown = frames([5] * 10, [1] * 10)
    batches = []

    class Flow:
        iteration = 3

        def label(self, config: DemonstrationConfig) -> Frames:
            return shown

        def fit(self, batch: Frames, rate: float) -> None:
            batches.append((batch, rate))

        def generator(self) -> torch.Generator:
            return torch.Generator().manual_seed(1)

    ClassifierTraining(ClassifierConfig(batch_size=8, warmup_steps=10), 100).iteration(Flow())
    ((batch, rate),) = batches
    assert (
        int(batch.success.sum()) == 4
        and int(batch.episode.max()) < 8
        and rate == pytest.approx(0.4)
    )

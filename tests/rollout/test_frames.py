"""Labelled frames for success classifiers, from episodes and from recordings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import RewardModel
from rlinf_vla.core.types import Inputs, Observation
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.rollout.demonstrations import labelled_frames
from rlinf_vla.testing.toy_env import GOALS, groups
from tests.data.test_from_dataset import NOISY, played, write


class Looks(RewardModel):
    images = {"base": (64, 64)}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def prepare(self, obs: Observation) -> Inputs:
        return {"image.base": obs.images["base"]}

    def forward(self, inputs: Inputs) -> Tensor:
        return inputs["image.base"].float().mean((1, 2, 3)) * self.weight


def level(image: Tensor) -> int:
    """The values that counter world's image shows."""
    return (int((image[-1, :, 0] == 255).sum()) - 32) // 8


def test_a_frame_shows_the_observation_after_a_step() -> None:
    fractions: list[float] = []
    found = labelled_frames(Looks(), groups(4, 2), NOISY, 0, fractions.append)
    assert (
        len(found) == sum(len(episode.frames[form.ACTION]) for episode in played())
        and fractions[-1] == 1.0
    )
    for number, episode in enumerate(played()):
        rows = found.episode == number
        assert found.success[rows].tolist() == episode.frames[form.SUCCESS].tolist()
        goal = list(GOALS.values())[number % 2]
        for image, success in zip(
            found.inputs["image.base"][rows], found.success[rows], strict=True
        ):
            assert (level(image) >= goal) == bool(success)
    assert found.success.any() and not found.success.all()


def test_groups_and_environments_do_not_change_the_frames() -> None:
    first, second = (
        labelled_frames(Looks(), envs, NOISY, 0) for envs in (groups(4, 2), groups(1, 1))
    )
    assert torch.equal(first.success, second.success) and torch.equal(first.episode, second.episode)
    assert torch.equal(first.inputs["image.base"], second.inputs["image.base"])


def test_a_datasets_frames_are_labelled_by_their_own_rows(tmp_path: Path) -> None:
    episodes = played()
    config = DemonstrationConfig(dataset=write(tmp_path / "data", episodes))
    found = labelled_frames(Looks(), (), config, 0)
    assert found.success.tolist() == [
        bool(each) for episode in episodes for each in episode.frames[form.SUCCESS]
    ]
    assert found.episode.tolist() == [
        number for number, episode in enumerate(episodes) for _ in episode.frames[form.SUCCESS]
    ]
    images = [
        torch.from_numpy(image)
        for episode in episodes
        for image in episode.frames[form.IMAGES + "base"]
    ]
    assert torch.equal(found.inputs["image.base"], torch.stack(images))
    silent = write(tmp_path / "silent", episodes, (form.SUCCESS,))
    with pytest.raises(UserError, match=r"has no feature next\.success"):
        labelled_frames(Looks(), (), replace(config, dataset=silent), 0)

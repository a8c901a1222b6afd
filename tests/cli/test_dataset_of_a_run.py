"""``rlinf-vla robot dataset``: what a run kept at its robot, with the operator's steps marked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.features.realworld.episode import DEMONSTRATION, Job
from tests.cli.conftest import CommandLine
from tests.cli.toy_robot import Arguments, toy_run
from tests.cli.toy_session import toy_session  # noqa: F401
from tests.features.realworld.toy_cell import Toy


def test_episodes_of_a_run_are_a_dataset(
    rlinf_vla: CommandLine, toy: Arguments, tmp_path: Path
) -> None:
    run = toy_run(tmp_path / "run", toy("train"))
    (run / "episodes").mkdir()
    words = ["robot", "dataset", "--config-dir", str(tmp_path), "run=run", "output=data"]
    empty = rlinf_vla(*words)
    assert "run has no episodes" in empty.complaint
    played = []
    for number, limit in enumerate((20, 1)):
        cell = Toy(limit=limit)
        cell.player.play(Job(DEMONSTRATION, number, 7 + number, scripted=True), cell.keep)
        (episode,) = cell.episodes
        images = {"front": torch.full((len(episode) + 1, 16, 16, 3), number, dtype=torch.uint8)}
        human = torch.arange(len(episode)) % 2 == 0
        played.append(replace(episode, images=images, human=human))
        played[-1].write(run / "episodes")
    found = rlinf_vla(*words, "record.video=false")
    assert found.code == 0, found.err
    people = sum(int(episode.human.sum()) for episode in played)
    assert "2 episodes, 1 with success; " in found.out and f"{people} of a person" in found.out
    reader = LeRobotReader(tmp_path / "data")
    for number, episode in enumerate(played):
        recorded = reader.episode(number, ["action", "intervention", "next.success"])
        steps = len(episode)
        assert np.array_equal(recorded.columns["action"][:steps], episode.action.numpy())
        assert np.array_equal(recorded.columns["intervention"][:steps], episode.human.numpy())
        assert not recorded.columns["intervention"][steps:].any()
        assert recorded.columns["next.success"].any() == episode.success
        assert all(
            (frame == number).all() for frame in reader.frames(recorded, "observation.images.front")
        )

"""Replay the actions of a recorded episode at a robot (``rlinf-vla robot replay``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from rlinf_vla.config.errors import UserError
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.from_dataset import require_same_control_rate
from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.realworld.cell import open_cell, require_robot
from rlinf_vla.realworld.dataset import ReplayScene
from rlinf_vla.realworld.episode import DEMONSTRATION, Job, RobotEpisode
from rlinf_vla.realworld.operator_session import OperatorLeft
from rlinf_vla.realworld.record import say
from rlinf_vla.rollout.episodes import DEMONSTRATION_SEEDS
from rlinf_vla.runtime import recipes


def run(config: DictConfig, number: int) -> None:
    """Replay episode ``number`` through all limits of the cell, and print how far the tool was from
    its recorded positions. Raises UserError."""
    recipe = recipes.read(config)
    require_robot(recipe, "replay")
    if recipe.algorithm.dataset is None:
        raise UserError("robot replay needs a recorded episode: algorithm.dataset=DIR episode=N")
    reader = LeRobotReader(Path(recipe.algorithm.dataset).expanduser())
    if not 0 <= number < len(reader):
        raise UserError(f"episode={number}: {recipe.algorithm.dataset} has episodes 0 to {len(reader) - 1}")
    recorded = reader.episode(number, [form.ACTION, form.STATE]).columns
    found: list[RobotEpisode] = []
    recipe.env.episode_limit = len(recorded[form.ACTION])
    with open_cell(recipe, say, lambda scene: ReplayScene(scene, recorded[form.ACTION])) as cell:
        require_same_control_rate(recipe.algorithm.dataset, [cell.spec])
        if recorded[form.ACTION].shape[1] != cell.spec.action_dim:
            raise UserError(f"the episode's actions have {recorded[form.ACTION].shape[1]} numbers, the policy's {cell.spec.action_dim}")
        # the layout of the recording, provided that `robot record` kept all episodes
        job = Job(DEMONSTRATION, number, DEMONSTRATION_SEEDS[number], scripted=True)
        cell.inference.begin(job)
        try:
            cell.player.play(job, found.append)
        except OperatorLeft as left:
            print(left)
            return
    (episode,) = found
    both = min(len(episode.state), len(recorded[form.STATE]))
    apart = 1e3 * np.linalg.norm(episode.state[:both, :3].numpy() - recorded[form.STATE][:both, :3], axis=1)
    print(f"{len(episode)} of {len(recorded[form.ACTION])} actions: {episode.ended}")
    print(f"the tool was {np.mean(apart):.1f} mm from where it had been, at most {np.max(apart):.1f} mm")
    print(f"limits that changed a command: {episode.interventions or 'none'}")

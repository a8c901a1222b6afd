"""``rlinf-vla robot replay recipe=franka_rlpd algorithm.dataset=DIR episode=0``: a recorded episode's actions at the robot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from rlinf_vla import recipe as recipes
from rlinf_vla.commands.robot_cell import opened, require_robot
from rlinf_vla.commands.robot_record import say
from rlinf_vla.datasets import lerobot_format as form
from rlinf_vla.datasets.lerobot_reader import LeRobotReader
from rlinf_vla.rollout.episodes import DEMONSTRATION_SEEDS
from rlinf_vla.rollout.from_dataset import refuse_another_pace
from rlinf_vla.rollout.robot_attendant import Left
from rlinf_vla.rollout.robot_dataset import Again
from rlinf_vla.rollout.robot_episode import DEMONSTRATION, Job, RobotEpisode
from rlinf_vla.types import UserError


def run(config: DictConfig, number: int) -> None:
    """Through every limit of the cell; says how far the tool was from where it had been."""
    recipe = recipes.read(config)
    require_robot(recipe, "replay")
    if recipe.algorithm.dataset is None:
        raise UserError("robot replay wants to know what: algorithm.dataset=DIR episode=N")
    reader = LeRobotReader(Path(recipe.algorithm.dataset).expanduser())
    if not 0 <= number < len(reader):
        raise UserError(f"episode={number}: {recipe.algorithm.dataset} has episodes 0 to {len(reader) - 1}")
    recorded = reader.episode(number, [form.ACTION, form.STATE]).columns
    found: list[RobotEpisode] = []
    recipe.env.episode_limit = len(recorded[form.ACTION])
    with opened(recipe, say, lambda scene: Again(scene, recorded[form.ACTION])) as cell:
        refuse_another_pace(recipe.algorithm.dataset, [cell.spec])
        if recorded[form.ACTION].shape[1] != cell.spec.action_dim:
            raise UserError(f"its actions have {recorded[form.ACTION].shape[1]} numbers, the policy's {cell.spec.action_dim}")
        # the layout it was recorded in, where `robot record` kept all
        job = Job(DEMONSTRATION, number, DEMONSTRATION_SEEDS[number], scripted=True)
        cell.inference.begin(job)
        try:
            cell.player.play(job, found.append)
        except Left as left:
            print(left)
            return
    (episode,) = found
    both = min(len(episode.state), len(recorded[form.STATE]))
    apart = 1e3 * np.linalg.norm(episode.state[:both, :3].numpy() - recorded[form.STATE][:both, :3], axis=1)
    print(f"{len(episode)} of {len(recorded[form.ACTION])} actions: {episode.ended}")
    print(f"the tool was {np.mean(apart):.1f} mm from where it had been, at most {np.max(apart):.1f} mm")
    print(f"limits that changed a command: {episode.interventions or 'none'}")

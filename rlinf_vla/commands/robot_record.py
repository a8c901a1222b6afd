"""``rlinf-vla robot record recipe=franka_rlpd output=DIR``: demonstrations at a robot, as a LeRobotDataset."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from rlinf_vla import recipe as recipes
from rlinf_vla.commands import session
from rlinf_vla.commands.robot_cell import opened, require_robot
from rlinf_vla.datasets.lerobot_writer import LeRobotWriter
from rlinf_vla.recipe.robot import NOBODY
from rlinf_vla.rollout.episodes import DEMONSTRATION_SEEDS, numbered_episodes
from rlinf_vla.rollout.robot_dataset import robot_features, robot_frames
from rlinf_vla.rollout.robot_episode import DEMONSTRATION, Job, RobotEpisode
from rlinf_vla.types import UserError


def run(config: DictConfig) -> None:
    """``algorithm.demonstrations`` episodes, by the scene's expert, or by the person of ``session.person``; those with success are kept."""
    recipe = recipes.read(config)
    require_robot(recipe, "record")
    count = recipe.algorithm.demonstrations
    if not recipe.output or count < 1:
        raise UserError("robot record wants to know where to write, and how much: output=DIR algorithm.demonstrations=N")
    output, successes = session.new_directory(recipe.output), 0
    seeds = numbered_episodes(DEMONSTRATION_SEEDS, 0, count, 1).seed.tolist()
    with opened(recipe, say) as cell:
        features = robot_features(cell.spec, recipe.record.video)
        with LeRobotWriter(output, cell.spec.control_hz, features, recipe.robot.name) as writer:

            def keep(episode: RobotEpisode) -> None:
                nonlocal successes
                successes += episode.success
                if len(episode) and (episode.success or recipe.record.failures):
                    writer.add_episode(robot_frames(episode), episode.instruction)
                print(f"episode {episode.job.number + 1}/{count}: {episode.ended}, {len(episode)} steps", flush=True)

            for number, seed in enumerate(seeds):
                job = Job(DEMONSTRATION, number, seed, scripted=recipe.session.person == NOBODY)
                cell.inference.begin(job)
                cell.player.play(job, keep)
    print(f"{count} episodes, {successes} with success; {writer.frames} frames in {session.relative(output)} (algorithm.dataset={output})")


def say(message: dict[str, Any]) -> None:
    """What the player tells, for a person at the console."""
    if "waiting" in message:
        print(f"the robot waits for {message['for']!r}: {message['waiting']}", flush=True)

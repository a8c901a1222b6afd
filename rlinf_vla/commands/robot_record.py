"""``rlinf-vla robot record recipe=franka_rlpd output=DIR``: demonstrations at a robot, as a LeRobotDataset."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rlinf_vla import recipe as recipes
from rlinf_vla.commands import session
from rlinf_vla.commands.robot_cell import opened, require_robot, require_shown
from rlinf_vla.datasets.lerobot_format import Feature
from rlinf_vla.datasets.lerobot_writer import LeRobotWriter
from rlinf_vla.recipe import Recipe
from rlinf_vla.recipe.robot import NOBODY
from rlinf_vla.rollout.episodes import DEMONSTRATION_SEEDS, numbered_episodes
from rlinf_vla.rollout.robot_attendant import Left
from rlinf_vla.rollout.robot_dataset import robot_features, robot_frames
from rlinf_vla.rollout.robot_episode import DEMONSTRATION, Job, RobotEpisode
from rlinf_vla.training import run_directory
from rlinf_vla.types import UserError


def run(config: DictConfig) -> None:
    """``algorithm.demonstrations`` episodes, by the scene's expert, or by the person of ``session.person``; those with success are kept.

    Each is a file beside ``output`` until the dataset is made of them, at the end or when a person leaves; after anything else the same
    command goes on.
    """
    recipe = recipes.read(config)
    require_robot(recipe, "record")
    count = recipe.algorithm.demonstrations
    if not recipe.output or count < 1:
        raise UserError("robot record wants to know where to write, and how much: output=DIR algorithm.demonstrations=N")
    require_shown(recipe)
    output = session.new_directory(recipe.output)
    seeds = numbered_episodes(DEMONSTRATION_SEEDS, 0, count, 1).seed.tolist()
    jobs = [Job(DEMONSTRATION, number, seed, scripted=recipe.session.person == NOBODY) for number, seed in enumerate(seeds)]
    parts = output.with_name(f".{output.name}.episodes")
    with run_directory.opened_for_recording(parts, config):
        _record(recipe, jobs, parts, output)


def _record(recipe: Recipe, jobs: list[Job], parts: Path, output: Path) -> None:
    """In ``parts``, which then become the dataset ``output``."""
    count = len(jobs)
    missing = [job for job in jobs if not (parts / job.file).exists()]
    if len(missing) < count:
        print(f"{count - len(missing)} of {count} episodes are in {session.relative(parts)}")

    def keep(episode: RobotEpisode) -> None:
        if not episode.fault:  # what an error or Ctrl-C cut is played again
            episode.write(parts)
        print(f"episode {episode.job.number + 1}/{count}: {episode.ended}, {len(episode)} steps", flush=True)

    with opened(recipe, say) as cell:
        features, hz = robot_features(cell.spec, recipe.record.video), cell.spec.control_hz
        try:
            for job in missing:
                cell.inference.begin(job)
                cell.player.play(job, keep)
        except Left as left:
            print(left)
        except BaseException:
            kept = sum((parts / job.file).exists() for job in jobs)
            print(f"{kept} of {count} episodes are in {session.relative(parts)}: the same command goes on")
            raise
    _write(recipe, output, hz, features, [path for job in jobs if (path := parts / job.file).exists()])
    shutil.rmtree(parts)


def _write(recipe: Recipe, output: Path, hz: float, features: dict[str, Feature], played: Sequence[Path]) -> None:
    successes = 0
    with LeRobotWriter(output, hz, features, recipe.robot.name) as writer:
        for path in played:
            episode = RobotEpisode.read(path)
            successes += episode.success
            if len(episode) and (episode.success or recipe.record.failures):
                writer.add_episode(robot_frames(episode), episode.instruction)
        if played and not writer.episodes:
            raise UserError(f"none of the {len(played)} episodes in {played[0].parent} is a success: record.failures=true takes them too")
    frames, where = writer.frames, session.relative(output)
    print(f"{len(played)} episodes, {successes} with success; {frames} frames in {where} (algorithm.dataset={output})")


def say(message: dict[str, Any]) -> None:
    """What the player tells, for a person at the console."""
    if "waiting" in message:
        print(f"the robot waits for {message['for']!r}: {message['waiting']}", flush=True)

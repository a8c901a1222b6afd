"""Record demonstrations at a robot as a LeRobotDataset (``rlinf-vla robot record``)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.config.robot import NO_OPERATOR
from rlinf_vla.data.lerobot_format import Feature, recorded_features
from rlinf_vla.data.lerobot_writer import LeRobotWriter
from rlinf_vla.realworld.cell import open_cell, require_demonstrator, require_robot
from rlinf_vla.realworld.dataset import robot_frames
from rlinf_vla.realworld.episode import DEMONSTRATION, Job, RobotEpisode
from rlinf_vla.realworld.operator_session import OperatorLeft
from rlinf_vla.rollout.episodes import DEMONSTRATION_SEEDS, numbered_episodes
from rlinf_vla.runtime import builders, recipes, run_directory


def run(config: DictConfig) -> None:
    """Run ``algorithm.demonstrations`` episodes by the scene's expert or the operator.

    Successful ones are kept; with ``record.failures`` all. Each is a file next to ``output`` until
    the dataset is written, at the end or when the operator quits; after any other interruption the
    same command resumes. Raises UserError.
    """
    recipe = recipes.read(config)
    require_robot(recipe, "record")
    count = recipe.algorithm.demonstrations
    if not recipe.output or count < 1:
        raise UserError("robot record needs an output directory and a number of episodes: output=DIR algorithm.demonstrations=N")
    require_demonstrator(recipe)
    output = builders.new_directory(recipe.output)
    seeds = numbered_episodes(DEMONSTRATION_SEEDS, 0, count, 1).seed.tolist()
    jobs = [Job(DEMONSTRATION, number, seed, scripted=recipe.session.operator == NO_OPERATOR) for number, seed in enumerate(seeds)]
    parts = output.with_name(f".{output.name}.episodes")
    with run_directory.opened_for_recording(parts, config):
        _record(recipe, jobs, parts, output)


def _record(recipe: Recipe, jobs: list[Job], parts: Path, output: Path) -> None:
    """Record missing episodes into ``parts``, then convert all to the dataset ``output``."""
    count = len(jobs)
    missing = [job for job in jobs if not (parts / job.file).exists()]
    if len(missing) < count:
        print(f"{count - len(missing)} of {count} episodes are in {builders.relative(parts)}")

    def keep(episode: RobotEpisode) -> None:
        if not episode.fault:  # an episode that an error or Ctrl-C cut is repeated
            episode.write(parts)
        print(f"episode {episode.job.number + 1}/{count}: {episode.ended}, {len(episode)} steps", flush=True)

    with open_cell(recipe, say) as cell:
        features, hz = recorded_features(cell.spec, recipe.record.video), cell.spec.control_hz
        try:
            for job in missing:
                cell.inference.begin(job)
                cell.player.play(job, keep)
        except OperatorLeft as left:
            print(left)
        except BaseException:
            kept = sum((parts / job.file).exists() for job in jobs)
            print(f"{kept} of {count} episodes are in {builders.relative(parts)}: the same command continues")
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
            raise UserError(f"none of the {len(played)} episodes in {played[0].parent} is a success: record.failures=true keeps them too")
    frames, where = writer.frames, builders.relative(output)
    print(f"{len(played)} episodes, {successes} with success; {frames} frames in {where} (algorithm.dataset={output})")


def say(message: dict[str, Any]) -> None:
    """Print what the robot waits for."""
    if "waiting" in message:
        print(f"the robot waits for {message['for']!r}: {message['waiting']}", flush=True)

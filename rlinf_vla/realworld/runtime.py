"""Run a recipe at a robot: the learner here, the robot process on this or another machine."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from rlinf_vla.config.recipe import Recipe
from rlinf_vla.config.robot import NO_OPERATOR
from rlinf_vla.core.protocols import Policy
from rlinf_vla.data.from_dataset import require_same_control_rate
from rlinf_vla.realworld.cell import check, require_single_actions, spec_of
from rlinf_vla.realworld.client import LocalRobotLink, RobotClient
from rlinf_vla.realworld.episode import EVALUATION, RobotEpisode, first_jobs
from rlinf_vla.realworld.flow import OnlineFlow
from rlinf_vla.rollout.episodes import EVALUATION_SEEDS
from rlinf_vla.rollout.evaluation_episodes import EpisodeResult
from rlinf_vla.runtime import builders, run_directory
from rlinf_vla.runtime.base import PlayEpisodes, Runtime
from rlinf_vla.training.checkpoint import save_checkpoint

FILM_PIXELS = 256
"""Minimum side of a video in pixels, whatever the policy's image size."""


@contextmanager
def at_robot(recipe: Recipe, directory: Path, checkpoint: Path | None, say: Callable[[str], None]) -> Iterator[Runtime]:
    """Start the robot process, build the learner and restore ``checkpoint``. Raises UserError.

    ``directory`` is the run directory; the robot process reads the recipe there.
    """
    check(recipe)
    with _robot_side(recipe, directory, say) as side:
        policy, trainer, state = builders.build_learner(recipe, checkpoint, say)
        assert isinstance(policy, Policy)
        require_single_actions(policy)
        say(f"robot {recipe.robot.name}")
        spec = spec_of(recipe, policy)
        if recipe.algorithm.dataset is not None and checkpoint is None:
            require_same_control_rate(recipe.algorithm.dataset, [spec])
        flow = OnlineFlow(
            side,
            recipe.iterations,
            recipe.session.learner_nice,
            60 * (recipe.session.minutes or math.inf),
            recipe.session.operator == NO_OPERATOR,
            trainer=trainer,
            settings=builders.actor_settings(recipe, recipe.rollout.temperature),
            config=recipe.algorithm,
            directory=directory / run_directory.REPLAY,
            state=state,
            update_threads=partial(builders.threads, recipe.cluster.update_threads),
        )

        def save(state: dict[str, Any]) -> None:
            save_checkpoint(directory / run_directory.CHECKPOINTS, policy, trainer, state, recipe.checkpoints.keep)

        yield Runtime(flow, spec, spec.control_hz, _evaluation(recipe.episodes, flow, side), save, state)


def _robot_side(recipe: Recipe, directory: Path, say: Callable[[str], None]) -> AbstractContextManager[RobotClient]:
    """Return the client of the robot process, on this machine or on a node of a Ray cluster."""
    if recipe.cluster.runtime == "ray":
        from rlinf_vla.realworld.ray_link import robot_on_ray

        return robot_on_ray(recipe, directory, say)
    return RobotClient(directory, partial(LocalRobotLink, directory, recipe.session.silence_s), say)


@contextmanager
def evaluating_at_robot(recipe: Recipe, config: DictConfig) -> Iterator[tuple[PlayEpisodes, float]]:
    """Yield what plays the recipe's evaluation episodes at the robot, and its calls per second."""
    recipe.algorithm.dataset = None  # evaluation needs no demonstrations
    with tempfile.TemporaryDirectory(prefix="rlinf-vla-") as folder:
        run_directory.save_recipe(Path(folder, run_directory.RECIPE), config)
        with at_robot(recipe, Path(folder), None, print) as runtime:
            assert runtime.play is not None
            yield runtime.play, runtime.calls_per_s


def _evaluation(episodes: int, flow: OnlineFlow, side: RobotClient) -> PlayEpisodes:
    """Return the function that runs evaluation episodes, without help of an expert.

    An episode that a fault cuts has failed; one that a pause cuts is repeated.
    """

    def play(temperature: float, filmed: int, progress: Callable[[float], None]) -> list[EpisodeResult]:
        jobs = first_jobs(EVALUATION, EVALUATION_SEEDS, episodes, temperature=temperature, weights=flow.share())
        for job in jobs:
            side.forget(job)  # left by an interrupted evaluation
            side.begin(job)
        results: list[EpisodeResult] = []
        for job in jobs:
            episode = side.episode(job, lambda: progress(len(results) / episodes))
            results.append(_result(episode, job.number < filmed))
            side.forget(job)
        return results

    return play


def _result(episode: RobotEpisode, filmed: bool) -> EpisodeResult:
    found = EpisodeResult(episode.task, episode.job.seed, episode.instruction, episode.success)
    found.steps, found.episode_return = int(episode.tick[-1]), float(episode.reward.sum())
    if filmed:
        pictures = next(iter(episode.images.values()))
        times = -(-FILM_PIXELS // min(pictures.shape[1:3]))
        found.frames = list(torch.repeat_interleave(torch.repeat_interleave(pictures, times, 1), times, 2))
    return found

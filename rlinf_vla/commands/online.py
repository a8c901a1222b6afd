"""The runtime of a recipe at a robot: the learner here, the robot's side in a process of its own, here or elsewhere."""

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

from rlinf_vla.commands import session
from rlinf_vla.commands.evaluate import Sweep, evaluate, headline
from rlinf_vla.commands.robot_cell import build_policy, check, spec_of
from rlinf_vla.commands.robot_link import Process
from rlinf_vla.commands.robot_side import RobotSide
from rlinf_vla.commands.runtimes import Runtime
from rlinf_vla.evaluation.sweep import EpisodeResult
from rlinf_vla.flow.online import OnlineFlow
from rlinf_vla.recipe import Recipe
from rlinf_vla.recipe.robot import NOBODY
from rlinf_vla.rollout.episodes import EVALUATION_SEEDS, numbered_episodes
from rlinf_vla.rollout.from_dataset import refuse_another_pace
from rlinf_vla.rollout.robot_episode import EVALUATION, Job, RobotEpisode
from rlinf_vla.telemetry.console import stages
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.training import run_directory
from rlinf_vla.training.checkpoint import load_checkpoint, save_checkpoint
from rlinf_vla.training.soft_trainer import SoftTrainer

FILM_PIXELS = 256
"""Videos are no smaller, whatever the policy sees."""


@contextmanager
def at_robot(recipe: Recipe, directory: Path, checkpoint: Path | None, say: Callable[[str], None]) -> Iterator[Runtime]:
    """``directory`` holds the recipe: the process beside the robot reads it there."""
    check(recipe)
    with _robot_side(recipe, directory, say) as side:
        policy = build_policy(recipe)
        if recipe.checkpoint is not None:
            load_checkpoint(Path(recipe.checkpoint).expanduser(), policy)
        trainer = session.build_trainer(recipe, policy)
        assert isinstance(trainer, SoftTrainer)
        state = load_checkpoint(checkpoint, policy, trainer) if checkpoint is not None else {}
        say(f"policy {recipe.model.name}: {sum(p.numel() for p in policy.parameters()):,} weights; robot {recipe.robot.name}")
        spec = spec_of(recipe, policy)
        if recipe.algorithm.dataset is not None and checkpoint is None:
            refuse_another_pace(recipe.algorithm.dataset, [spec])
        flow = OnlineFlow(
            side,
            recipe.iterations,
            recipe.session.learner_nice,
            60 * (recipe.session.minutes or math.inf),
            recipe.session.person == NOBODY,
            policy=trainer.policy,
            trainer=trainer,
            settings=session.actor_settings(recipe, recipe.rollout.temperature),
            timeline=Timeline(),
            config=recipe.algorithm,
            directory=directory / run_directory.REPLAY,
            state=state,
            update_threads=partial(session.threads, recipe.cluster.update_threads),
        )

        def save(state: dict[str, Any]) -> None:
            save_checkpoint(directory / run_directory.CHECKPOINTS, policy, trainer, state, recipe.checkpoints.keep)

        yield Runtime(flow, spec, spec.control_hz, _evaluation(recipe.episodes, flow, side), save, state)


def _robot_side(recipe: Recipe, directory: Path, say: Callable[[str], None]) -> AbstractContextManager[RobotSide]:
    """What plays beside the robot: on this machine, or on the robot's node of a cluster."""
    if recipe.cluster.runtime == "ray":
        from rlinf_vla.commands.robot_on_ray import robot_on_ray

        return robot_on_ray(recipe, directory, say)
    return RobotSide(directory, partial(Process, directory, recipe.session.silence_s), say)


def evaluate_at_robot(recipe: Recipe, config: DictConfig) -> None:
    """``rlinf-vla eval``, of one checkpoint or the recipe's start."""
    checkpoint = Path(recipe.checkpoint).expanduser() if recipe.checkpoint else None
    directory = run_directory.for_evaluation(config, checkpoint)
    recipe.algorithm.dataset = None  # nothing is learnt
    name = checkpoint.name if checkpoint else "start"
    with tempfile.TemporaryDirectory(prefix="rlinf-vla-") as folder, stages() as progress:
        run_directory.keep(Path(folder), config)
        with at_robot(recipe, Path(folder), None, print) as runtime:
            told = str(checkpoint or recipe.model.checkpoint)
            document = evaluate(recipe, runtime.play, runtime.calls_per_s, name, told, 0, directory, progress)
    print(f"success of {name} in {recipe.episodes} episodes at {recipe.robot.name}: {headline(document)}")
    print(f"episodes, seeds and machine: {session.relative(directory / 'evaluation' / f'{name}.json')}")


def _evaluation(episodes: int, flow: OnlineFlow, side: RobotSide) -> Sweep:
    """Nobody helps in it; what a fault cuts has failed, what a pause cuts is played again."""

    def play(temperature: float, filmed: int, progress: Callable[[float], None]) -> list[EpisodeResult]:
        version, listed = flow.share(), numbered_episodes(EVALUATION_SEEDS, 0, episodes, 1)
        jobs = [Job(EVALUATION, number, seed, False, temperature, version) for number, seed in enumerate(listed.seed.tolist())]
        for job in jobs:
            side.forget(job)  # of an evaluation that was interrupted
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

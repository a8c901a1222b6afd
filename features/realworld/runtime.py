"""Run a recipe at a robot: the learner here, the robot process on this or another machine."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import INTERACTIVE, OFF_POLICY, ON_POLICY, SUPERVISED, Recipe
from rlinf_vla.config.robot import NO_OPERATOR
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.tasks import EVALUATION_SEEDS
from rlinf_vla.data.dataset_source import require_same_control_rate
from rlinf_vla.features.realworld.cell import (
    check,
    require_demonstrator,
    require_whole_chunks,
    spec_of,
)
from rlinf_vla.features.realworld.client import LocalRobotLink, RobotClient
from rlinf_vla.features.realworld.dagger import DAggerFlow
from rlinf_vla.features.realworld.episode import EVALUATION, RUN, RobotEpisode, first_jobs
from rlinf_vla.features.realworld.flow import OnlineFlow
from rlinf_vla.rollout.evaluation_episodes import EpisodeResult
from rlinf_vla.runtime import builders, run_directory
from rlinf_vla.runtime.base import BaseFlow, PlayEpisodes, Runtime
from rlinf_vla.runtime.builders import trainer_class
from rlinf_vla.runtime.supervised import SupervisedFlow
from rlinf_vla.runtime.workers.local import local_workers
from rlinf_vla.telemetry.run_files import CONTROL_FILE
from rlinf_vla.training.checkpoint import save_checkpoint

FILM_PIXELS = 256
"""Minimum side of a video in pixels, whatever the policy's image size."""


@contextmanager
def at_robot(
    recipe: Recipe, directory: Path, checkpoint: Path | None, say: Callable[[str], None]
) -> Iterator[Runtime]:
    """Start the robot process, build the learner and restore ``checkpoint``. Raises UserError.

    ``directory`` is the run directory; the robot process reads the recipe there.
    """
    if checkpoint is None:
        require_demonstrator(recipe)
    check(recipe)
    config = recipe.algorithm
    family = recipe.algorithm.family
    if family == ON_POLICY or not config.acts:
        raise UserError(
            f"algorithm={config.name} cannot learn at a robot, in single episodes: set algorithm=sac or hg_dagger, or sft"
        )
    if family == SUPERVISED and not config.demonstrations.datasets:
        raise UserError(
            "algorithm=sft at a robot needs algorithm.demonstrations.dataset=DIR: rlinf-vla robot record makes one"
        )
    with _robot_side(recipe, directory, say) as side:
        policy, trainer, state = builders.build_learner(recipe, checkpoint, say)
        assert isinstance(policy, Policy)
        say(f"robot {recipe.robot.name}")
        spec = spec_of(recipe, policy.spec)
        policy.fit_instructions(spec.instructions)
        settings = builders.actor_settings(recipe, recipe.rollout.temperature)
        workers = local_workers(
            policy,
            (),
            (),
            trainer,
            builders.build_algorithm(recipe),
            settings,
            recipe.cluster,
            trainer_class(recipe),
        )
        datasets = (
            [config.dataset] * (config.dataset is not None)
            if family == OFF_POLICY
            else [entry.dataset for entry in config.demonstrations.datasets.values()]
        )
        for dataset in datasets if checkpoint is None else ():
            require_same_control_rate(dataset, [spec])
        flow: BaseFlow
        if family == SUPERVISED:
            flow = SupervisedFlow(workers, settings, say)
        elif family == INTERACTIVE:
            flow = DAggerFlow(
                side,
                directory / run_directory.EPISODES,
                workers,
                settings,
                say,
            )
        else:
            require_whole_chunks(recipe.control, policy.spec.chunk)
            flow = OnlineFlow(
                side,
                recipe.iterations,
                workers,
                recipe.session.learner_nice,
                recipe.session.operator == NO_OPERATOR,
                settings=settings,
                config=config,
                directory=directory / run_directory.REPLAY,
                state=state,
                instructions=spec.instructions,
            )

        flow.time_limit_s = 60 * (recipe.session.minutes or math.inf)

        def share() -> int:
            side.share(trainer.acting_weights, flow.policy_version)
            return flow.policy_version

        def save(state: dict[str, Any]) -> None:
            save_checkpoint(
                directory / run_directory.CHECKPOINTS,
                policy,
                trainer,
                state,
                recipe.checkpoints.keep,
            )

        yield Runtime(
            flow,
            spec,
            spec.control_hz,
            _playing(recipe.episodes, share, side),
            save,
            state,
        )


def _robot_side(
    recipe: Recipe, directory: Path, say: Callable[[str], None]
) -> AbstractContextManager[RobotClient]:
    """Return the client of the robot process, on this machine or on a node of a Ray cluster."""
    if recipe.cluster.runtime == "ray":
        from rlinf_vla.features.realworld.ray_link import robot_on_ray

        return robot_on_ray(recipe, directory, say)
    return RobotClient(directory, partial(LocalRobotLink, directory, recipe.session.silence_s), say)


@contextmanager
def playing_at_robot(
    recipe: Recipe, config: DictConfig, control: Path, kept: Path | None = None
) -> Iterator[tuple[PlayEpisodes, float]]:
    """Yield what plays the recipe's episodes at the robot, and the control rate in Hz.

    Nobody learns: the robot process loads ``recipe.checkpoint``. ``config``: the composed recipe.
    ``control``: file that gets the control loop's statistics. ``kept``: directory that gets the
    episodes, in which the operator may help; None: an evaluation, whose episodes are deleted.
    Raises UserError.
    """
    check(recipe)
    spec = spec_of(recipe, builders.outline(recipe).spec)
    on_ray = recipe.cluster.runtime == "ray"
    with tempfile.TemporaryDirectory(prefix="rlinf-vla-") as folder:
        directory = Path(folder)
        robot_config = OmegaConf.merge(
            config,
            {
                "checkpoint": None if on_ray else recipe.checkpoint,
                "algorithm": _without_data(recipe),
            },
        )
        assert isinstance(robot_config, DictConfig)
        run_directory.save_recipe(directory / run_directory.RECIPE, robot_config)
        with _robot_side(recipe, directory, print) as side:
            if (
                on_ray and recipe.checkpoint is not None
            ):  # a checkpoint need not be on the robot's machine
                network = builders.build_initial(recipe)
                weights = {
                    name: parameter.detach()
                    for name, parameter in network.named_parameters()
                    if parameter.requires_grad
                }
                side.share(lambda: weights, 0)
            try:
                yield _playing(recipe.episodes, lambda: 0, side, kept), spec.control_hz
            finally:
                if (directory / CONTROL_FILE).exists():
                    control.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(directory / CONTROL_FILE, control)


def _without_data(recipe: Recipe) -> dict[str, None]:
    """Return the change to ``algorithm`` of a session that needs no demonstrations."""
    return {"dataset": None} if getattr(recipe.algorithm, "dataset", None) is not None else {}


def _playing(
    episodes: int, weights: Callable[[], int], side: RobotClient, kept: Path | None = None
) -> PlayEpisodes:
    """Return the function that runs episodes with the current ``weights``.

    An episode that a fault cuts has failed; one that a pause cuts is repeated. ``kept``: see
    ``playing_at_robot``.
    """
    kind = EVALUATION if kept is None else RUN

    def play(
        temperature: float, filmed: int, progress: Callable[[float], None], probe: str | None
    ) -> list[EpisodeResult]:
        jobs = first_jobs(
            kind, EVALUATION_SEEDS, episodes, temperature=temperature, weights=weights()
        )
        for job in jobs:
            side.forget(job)  # left by an interrupted evaluation
            side.begin(job)
        results: list[EpisodeResult] = []
        for job in jobs:
            episode = side.episode(job, lambda: progress(len(results) / episodes))
            results.append(_result(episode, job.number < filmed))
            side.forget(job, kept)
        return results

    return play


def _result(episode: RobotEpisode, filmed: bool) -> EpisodeResult:
    result = EpisodeResult(episode.task, episode.job.seed, episode.instruction, episode.success)
    result.steps = int(episode.tick[-1])
    result.episode_return = float(episode.reward.sum())
    result.details = {
        "ended": episode.ended,
        "stopped": episode.fault,
        "executed": len(episode),
        "by_operator": int(episode.human.sum()),
        "interventions": episode.interventions,
        "cost": float(episode.cost.sum()),
    }
    if filmed:
        result.frames = _frames(episode)
    return result


def _frames(episode: RobotEpisode) -> list[Tensor]:
    """Return all cameras beside each other, uint8 ``[H, W, 3]``, at every step."""
    height = max(FILM_PIXELS, *(images.shape[1] for images in episode.images.values()))
    parts = []
    for images in episode.images.values():
        times = -(-height // images.shape[1])
        large = torch.repeat_interleave(torch.repeat_interleave(images, times, 1), times, 2)
        parts.append(large[:, :height])
    return list(torch.cat(parts, 2))

"""Record demonstrations at a robot as a LeRobotDataset, and replay a recorded episode."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.config.robot import NO_OPERATOR
from rlinf_vla.core import plugins
from rlinf_vla.core.protocols import EnvSpec
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.dataset_source import require_same_control_rate
from rlinf_vla.data.lerobot_format import Column, Feature, recorded_features
from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.data.lerobot_writer import LeRobotWriter
from rlinf_vla.features.realworld.action_space import ActionSpace
from rlinf_vla.features.realworld.camera_geometry import geometry
from rlinf_vla.features.realworld.cell import (
    open_cell,
    require_demonstrator,
    require_robot,
    spec_of,
)
from rlinf_vla.features.realworld.episode import DEMONSTRATION, Job, RobotEpisode, first_jobs
from rlinf_vla.features.realworld.operator_session import OperatorLeft
from rlinf_vla.features.realworld.robot import Action, RobotState, Scene
from rlinf_vla.rollout.episodes import DEMONSTRATION_SEEDS
from rlinf_vla.runtime import builders, recipes, run_directory


def robot_frames(episode: RobotEpisode, space: ActionSpace) -> dict[str, Column]:
    """Return a frame per executed step, with every feature of ``recorded_features``.
    A truncated episode also gets its last observation, with an action that moves nothing."""
    rows = len(episode) + (not episode.terminated)
    last = np.arange(rows) == rows - 1
    action = np.zeros((rows, episode.action.shape[1]), np.float32)
    reward = np.zeros(rows, np.float32)
    action[: len(episode)], reward[: len(episode)] = episode.action, episode.reward
    action[len(episode) :] = space.hold(
        action.shape[1], episode.action[-1].numpy(), episode.state[-1].numpy()
    )
    columns: dict[str, Column] = {
        form.STATE: episode.state[:rows].numpy(),
        form.ACTION: action,
        form.REWARD: reward,
    }
    columns |= {
        form.DONE: last,
        form.TRUNCATED: last & (not episode.terminated),
        form.SUCCESS: last & episode.success,
    }
    return columns | {
        form.IMAGES + name: images[:rows].numpy() for name, images in episode.images.items()
    }


INTERVENTION = "intervention"
"""Feature of a run's dataset that is true where the operator acted."""


def dataset(config: DictConfig) -> None:
    """Write the episodes that a run kept at its robot, failures included, as a LeRobotDataset.

    Raises UserError if there is none, or the output is not empty.
    """
    recipe = recipes.read(config)
    require_robot(recipe, "dataset")
    if recipe.checkpoint is None or not recipe.output:
        raise UserError("robot dataset needs a run and an output: run=RUN output=DIR")
    directory, _ = run_directory.split(Path(recipe.checkpoint))
    episodes = sorted((directory / run_directory.EPISODES).glob("*.safetensors"))
    if not episodes:
        raise UserError(
            f"{builders.relative(directory)} has no episodes: SAC's family keeps them in its replay, hg_dagger and robot run in episodes/"
        )
    output = builders.new_directory(recipe.output)
    spec = spec_of(recipe, builders.outline(recipe).spec)
    space = (
        plugins.choose("robot", recipe.robot.name, plugins.robots()).make(recipe.robot).spec.space
    )
    features = _features(spec, space, recipe.record.video) | {INTERVENTION: Feature("bool", (1,))}
    successes = people = 0
    with LeRobotWriter(output, spec.control_hz, features, recipe.robot.name) as writer:
        for path in episodes:
            episode = RobotEpisode.read(path)
            if not len(episode):
                continue
            frames = robot_frames(episode, space)
            frames[INTERVENTION] = np.zeros(len(frames[form.ACTION]), bool)
            frames[INTERVENTION][: len(episode)] = episode.human.numpy()
            writer.add_episode(frames, episode.instruction)
            successes += episode.success
            people += int(episode.human.sum())
    print(
        f"{writer.episodes} episodes, {successes} with success; {writer.frames} frames, {people} of a person: {builders.relative(output)}"
    )


class ReplayScene:
    """Implements ``Scene``: wrap ``scene`` with an expert that replays ``actions``.
    actions: float32 ``[N, D]``. Each episode starts with the first; after the last the expert
    returns None."""

    has_expert = True

    def __init__(self, scene: Scene, actions: Column) -> None:
        self._scene = scene
        self._actions = actions
        self._done = 0
        self.task = scene.task
        self.by_hand = scene.by_hand
        self.instructions = scene.instructions

    def arrange(self, seed: int) -> str:
        self._done = 0
        return self._scene.arrange(seed)

    def succeeded(self, state: RobotState) -> bool | None:
        return self._scene.succeeded(state)

    def expert(self, state: RobotState) -> Action | None:
        if self._done == len(self._actions):
            return None
        self._done += 1
        action: Action = self._actions[self._done - 1]
        return action


def record(config: DictConfig) -> None:
    """Run ``algorithm.demonstrations`` episodes by the scene's expert or the operator.

    Successful ones are kept; with ``record.failures`` all. Each is a file next to ``output`` until
    the dataset is written, at the end or when the operator quits; after any other interruption the
    same command resumes. Raises UserError.
    """
    recipe = recipes.read(config)
    require_robot(recipe, "record")
    count = recipe.algorithm.demonstrations
    if not recipe.output or count < 1:
        raise UserError(
            "robot record needs an output directory and a number of episodes: output=DIR algorithm.demonstrations=N"
        )
    require_demonstrator(recipe)
    output = builders.new_directory(recipe.output)
    jobs = first_jobs(
        DEMONSTRATION, DEMONSTRATION_SEEDS, count, scripted=recipe.session.operator == NO_OPERATOR
    )
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
        print(
            f"episode {episode.job.number + 1}/{count}: {episode.ended}, {len(episode)} steps",
            flush=True,
        )

    with open_cell(recipe, say) as cell:
        space = cell.robot.spec.space
        features = _features(cell.spec, space, recipe.record.video)
        hz = cell.spec.control_hz
        cameras = {
            form.IMAGES + camera.name: intrinsics
            for camera in cell.cameras
            if (intrinsics := geometry(camera))
        }
        try:
            for job in missing:
                cell.inference.begin(job)
                cell.player.play(job, keep)
        except OperatorLeft as left:
            print(left)
        except BaseException:
            complete = sum((parts / job.file).exists() for job in jobs)
            print(
                f"{complete} of {count} episodes are in {builders.relative(parts)}: the same command continues"
            )
            raise
    files = [path for job in jobs if (path := parts / job.file).exists()]
    successes = 0
    with LeRobotWriter(output, hz, features, recipe.robot.name, cameras) as writer:
        for path in files:
            episode = RobotEpisode.read(path)
            successes += episode.success
            if len(episode) and (episode.success or recipe.record.failures):
                writer.add_episode(robot_frames(episode, space), episode.instruction)
        if files and not writer.episodes:
            raise UserError(
                f"none of the {len(files)} episodes in {parts} is a success: record.failures=true keeps them too"
            )
    frames = writer.frames
    where = builders.relative(output)
    print(
        f"{len(files)} episodes, {successes} with success; {frames} frames in {where} (algorithm.dataset={output})"
    )
    shutil.rmtree(parts)


def _features(spec: EnvSpec, space: ActionSpace, video: bool) -> dict[str, Feature]:
    """Return the dataset's features; joints have LeRobot's names."""
    features = recorded_features(spec, video)
    names = space.joint_names
    if names is None:
        return features
    return features | {
        key: replace(features[key], names=[f"{name}.pos" for name in names])
        for key in (form.STATE, form.ACTION)
    }


def say(message: dict[str, Any]) -> None:
    """Print what the robot waits for."""
    if "waiting" in message:
        print(f"the robot waits for {message['for']!r}: {message['waiting']}", flush=True)


def replay(config: DictConfig, number: int) -> None:
    """Replay episode ``number`` through all limits of the cell, and print how far the arm was from
    its recorded positions. Raises UserError."""
    recipe = recipes.read(config)
    require_robot(recipe, "replay")
    if recipe.algorithm.dataset is None:
        raise UserError("robot replay needs a recorded episode: algorithm.dataset=DIR episode=N")
    reader = LeRobotReader(Path(recipe.algorithm.dataset).expanduser())
    if not 0 <= number < len(reader):
        raise UserError(
            f"episode={number}: {recipe.algorithm.dataset} has episodes 0 to {len(reader) - 1}"
        )
    recording = reader.episode(number, [form.ACTION, form.STATE])
    recorded = {key: recording.vectors(key) for key in recording.columns}
    episodes: list[RobotEpisode] = []
    recipe.env.episode_limit = recipe.control.max_misses * len(
        recorded[form.ACTION]
    )  # held periods cut no action
    with open_cell(recipe, say, lambda scene: ReplayScene(scene, recorded[form.ACTION])) as cell:
        require_same_control_rate(recipe.algorithm.dataset, [cell.spec])
        if recorded[form.ACTION].shape[1] != cell.spec.action_dim:
            raise UserError(
                f"the episode's actions have {recorded[form.ACTION].shape[1]} numbers, the policy's {cell.spec.action_dim}"
            )
        # the layout of the recording, provided that `robot record` kept all episodes
        job = Job(DEMONSTRATION, number, DEMONSTRATION_SEEDS[number], scripted=True)
        cell.inference.begin(job)
        try:
            cell.player.play(job, episodes.append)
        except OperatorLeft as left:
            print(left)
            return
    (episode,) = episodes
    both = min(len(episode.state), len(recorded[form.STATE]))
    apart = episode.state[:both].numpy() - recorded[form.STATE][:both]
    print(f"{len(episode)} of {len(recorded[form.ACTION])} actions: {episode.ended}")
    print(_distance(apart, cell.robot.spec.space))
    print(f"limits that changed a command: {episode.interventions or 'none'}")


def _distance(apart: Column, space: ActionSpace) -> str:
    """Describe differences of states ``[L, S]``."""
    if space.joint_names is None:
        distances = 1e3 * np.linalg.norm(apart[:, :3], axis=1)
        return f"the tool was {np.mean(distances):.1f} mm from where it had been, at most {np.max(distances):.1f} mm"
    joint = int(np.abs(apart).max(0).argmax())
    distances = np.abs(apart[:, joint])
    name = space.joint_names[joint]
    return f"{name}, the furthest joint, was {np.mean(distances):.1f} from where it had been, at most {np.max(distances):.1f}"

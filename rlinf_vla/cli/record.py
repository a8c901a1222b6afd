"""Record episodes of the scripted expert, or of a policy, as a LeRobotDataset."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.config.errors import Failure, UserError
from rlinf_vla.config.recipe import POLICY, DeadlineConfig, Recipe
from rlinf_vla.core.interrupt import Interrupt, deferred_signals
from rlinf_vla.core.protocols import Policy, VectorEnv
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.lerobot_writer import LeRobotWriter
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.rollout.recording import (
    RecordedEpisode,
    features_of,
    record_expert,
    record_policy,
)
from rlinf_vla.runtime import builders, recipes, run_directory
from rlinf_vla.telemetry.console import stages
from rlinf_vla.training.lora import acting

PUBLISHED, DATASET = "published.json", "dataset"
"""In the directory of episodes: a copy of the output's ``meta/info.json``; the dataset until it is
complete or interrupted."""


def run(config: DictConfig) -> None:
    """Run episodes and write the successful ones, or all with ``record.failures=true``.

    Those of the expert are ``algorithm.demonstrations.episodes``, with the noise of imitation
    learning; of a policy, ``episodes`` at ``rollout.temperature``.
    Each is a file next to ``output`` until all are played. After an interruption ``output`` is a
    dataset of those so far, and the same command continues, with the result of an uninterrupted
    recording. Raises UserError.
    """
    recipe = recipes.read(config)
    demonstrations = getattr(recipe.algorithm, "demonstrations", None)
    if recipe.record.player == POLICY:
        builders.require_weights(recipe, "no policy to record")
        if recipe.rollout.deadline != DeadlineConfig():
            raise UserError(
                "record.player=policy executes one action after the other, without delays: leave rollout.deadline out"
            )
        played = range(recipe.record.first, recipe.record.first + recipe.episodes)
    else:
        if not isinstance(demonstrations, DemonstrationConfig):
            raise UserError(
                "record needs algorithm.demonstrations: rlinf-vla record recipe=maniskill_sft output=DIR, or record.player=policy"
            )
        if demonstrations.datasets:
            raise UserError(
                "record plays the scripted expert: leave algorithm.demonstrations.dataset out, or set record.player=policy"
            )
        played = range(recipe.record.first, recipe.record.first + demonstrations.episodes)
    if not recipe.output:
        raise UserError(
            f"record needs an output directory: rlinf-vla record recipe={recipe.name} output=DIR"
        )
    recording = Recording(recipe, played)
    fixed = {"algorithm", "record", "checkpoint"}
    with (
        run_directory.opened_for_recording(recording.parts, config, fixed=fixed),
        deferred_signals() as interrupt,
    ):
        recording.record(interrupt)


class Recording:
    """The recording of ``output`` and the files of its episodes, ``.NAME.episodes`` next to it."""

    def __init__(self, recipe: Recipe, numbers: range) -> None:
        """``numbers``: of the episodes. Raises UserError if ``output`` holds anything but what this
        recording left there."""
        assert recipe.output is not None
        self.recipe = recipe
        self.numbers = numbers
        self.output = Path(recipe.output).expanduser().absolute()
        self.parts = self.output.with_name(f".{self.output.name}.episodes")
        ours = self.parts / PUBLISHED
        there = self.output / form.INFO
        if not (ours.is_file() and there.is_file() and ours.read_bytes() == there.read_bytes()):
            builders.new_directory(recipe.output)
        self.played = self.successes = 0
        self._writing = False

    def record(self, interrupt: Interrupt) -> None:
        """Play what is missing; on any exception, keep what was played and print how to go on."""
        shutil.rmtree(self.parts / DATASET, ignore_errors=True)
        try:
            policy = self._policy()
            depth = self.recipe.rollout.pipeline_depth
            with (
                stages() as progress,
                builders.open_envs(self.recipe, policy, depth) as groups,
            ):
                spec = groups[0].spec
                features = features_of(spec, self.recipe.record.video, by_expert=policy is None)
                writer = LeRobotWriter(
                    self.parts / DATASET, spec.control_hz, features, self.recipe.env.name
                )
                try:

                    def add(episode: RecordedEpisode) -> None:
                        self._add(writer, episode)
                        progress("episodes", self.played / len(self.numbers))
                        interrupt.check()

                    def finished(episode: RecordedEpisode) -> None:
                        episode.write(self._part(self.played), frames=self._is_kept(episode))
                        add(episode)

                    while self.played < len(self.numbers) and self._part(self.played).exists():
                        add(RecordedEpisode.read(self._part(self.played)))
                    if self.played:
                        print(
                            f"{self.played} of {len(self.numbers)} episodes are in {builders.relative(self.parts)}"
                        )
                    self._play(policy, groups, finished)
                except BaseException as error:
                    self._keep(writer, error)
                    raise
                self._complete(writer)
        finally:
            if not self._part(0).exists():  # nothing was played, or all is in the output
                shutil.rmtree(self.parts, ignore_errors=True)

    def _policy(self) -> Policy | None:
        """Return the policy that is recorded; None: the expert is."""
        if self.recipe.record.player != POLICY:
            return None
        recipe = self.recipe
        if recipe.checkpoint is not None:
            checkpoint = run_directory.checkpoint_at(recipe.checkpoint, "checkpoint")
            recipe = replace(recipe, checkpoint=str(checkpoint))
        policy = builders.build_initial(recipe)
        if not isinstance(policy, Policy):
            raise UserError(
                f"record.player=policy: recipe={self.recipe.name} has no policy, choose another recipe"
            )
        return policy

    def _play(
        self,
        policy: Policy | None,
        groups: Sequence[VectorEnv],
        finished: Callable[[RecordedEpisode], None],
    ) -> None:
        """Play the episodes that are missing."""
        numbers = self.numbers[self.played :]
        if policy is None:
            config = self.recipe.algorithm.demonstrations
            record_expert(groups, config, self.recipe.seed, finished, numbers)
            return
        settings = builders.actor_settings(self.recipe, self.recipe.rollout.temperature)
        with acting(policy, settings.rounded):
            actor = Actor(policy, settings)
            limited = builders.timed(self.recipe, groups, policy.spec.chunk)
            record_policy(actor, limited, numbers, finished)

    def _part(self, number: int) -> Path:
        return self.parts / f"episode_{number:06d}.npz"

    def _is_kept(self, episode: RecordedEpisode) -> bool:
        return episode.success or (self.recipe.record.failures and not episode.cut)

    def _add(self, writer: LeRobotWriter, episode: RecordedEpisode) -> None:
        self._writing = True
        if self._is_kept(episode):
            writer.add_episode(episode.frames, episode.instruction)
        self._writing = False
        self.played = self.played + 1
        self.successes = self.successes + episode.success

    def _keep(self, writer: LeRobotWriter, error: BaseException) -> None:
        """Make a dataset of the whole episodes, unless the writer failed in one of them."""
        text = f"{self.played} of {len(self.numbers)} episodes were played"
        if writer.episodes and not self._writing:
            with suppress(Exception):  # a full disk, for instance: the episodes' files remain
                self._publish(writer)
                text += (
                    f", {writer.episodes} of them are the dataset {builders.relative(self.output)}"
                )
        text += ": the same command continues"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise Failure(
                f"{os.strerror(error.errno)}: {text} once there is room on the disk"
            ) from None
        print(text, file=sys.stderr)

    def _complete(self, writer: LeRobotWriter) -> None:
        if not writer.episodes:
            shutil.rmtree(self.parts)
            who, fix = ("the policy", "")
            if self.recipe.record.player != POLICY:
                who, fix = ("the expert", "lower algorithm.demonstrations.noise, or ")
            raise UserError(
                f"{who} succeeded in none of {self.played} episodes, and nothing was written: "
                f"{fix}keep failed episodes with record.failures=true"
            )
        self._publish(writer)
        shutil.rmtree(self.parts)
        where = builders.relative(self.output)
        print(f"{self.played} episodes played, {self.successes} with success")
        print(
            f"{writer.episodes} episodes, {writer.frames} frames: {where} (use it as algorithm.demonstrations.dataset)"
        )

    def _publish(self, writer: LeRobotWriter) -> None:
        """Replace ``output``, which is empty or an earlier part of this recording."""
        writer.finalize()
        shutil.copy(writer.directory / form.INFO, self.parts / PUBLISHED)
        shutil.rmtree(self.output, ignore_errors=True)
        writer.directory.rename(self.output)

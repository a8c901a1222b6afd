"""Record the episodes of a scripted expert, or of a policy, as those of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from torch import Tensor

from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.devices import CPU, moved
from rlinf_vla.core.io import replacing
from rlinf_vla.core.protocols import EnvSpec, VectorEnv
from rlinf_vla.core.types import Tensors
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.lerobot_format import Column, Feature
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.rollout.demonstrations import LABEL, Untimed, play_expert
from rlinf_vla.rollout.episodes import DEMONSTRATION_SEEDS, numbered_episodes
from rlinf_vla.rollout.player import Call, EpisodeRows, play_episodes
from rlinf_vla.rollout.stepwise import Stepwise

EXPERT_ACTION = "expert_action"
"""Dataset feature of the expert's noise-free action; ``action`` is the executed one.
LeRobot's policies learn features whose name begins with ``action``, so this one does not."""
OnCall = Callable[[VectorEnv, Call, Tensor], None]


@dataclass
class RecordedEpisode:
    """One episode. frames: every feature of :func:`features_of` ``[L, *shape]``."""

    frames: dict[str, Column]
    instruction: str
    success: bool
    cut: bool
    """The simulator failed, see ``faults``."""

    def write(self, path: Path, frames: bool = True) -> None:
        """Write the episode atomically, without its ``frames`` if they are not needed."""
        values: dict[str, Any] = {
            "instruction": self.instruction,
            "success": self.success,
            "cut": self.cut,
        }
        values |= self.frames if frames else {}
        with replacing(path) as aside, aside.open("wb") as file:
            np.savez_compressed(file, **values)

    @classmethod
    def read(cls, path: Path) -> RecordedEpisode:
        """Read what ``write`` wrote. Raises UserError if it is damaged."""
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {key: file[key] for key in file.files}
            return cls(
                arrays,
                str(arrays.pop("instruction")),
                bool(arrays.pop("success")),
                bool(arrays.pop("cut")),
            )
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise UserError(
                f"{path} is no recorded episode ({error}): delete it and all later ones"
            ) from None


def features_of(spec: EnvSpec, video: bool, by_expert: bool = True) -> dict[str, Feature]:
    """Return the dataset's features; ``video``: store cameras as video instead of images.

    ``by_expert``: with the expert's action.
    """
    more = {EXPERT_ACTION: Feature("float32", (spec.action_dim,))} if by_expert else {}
    return form.recorded_features(spec, video, more)


def record_expert(
    groups: Sequence[VectorEnv],
    config: DemonstrationConfig,
    run_seed: int,
    finished: Callable[[RecordedEpisode], None],
    numbers: range | None = None,
) -> None:
    """Run the episodes of these numbers, by default those of ``collect_demonstrations``;
    ``finished`` gets them in their order."""
    played = range(config.episodes) if numbers is None else numbers

    def play(on_call: OnCall) -> None:
        play_expert(lambda obs: {}, groups, config, run_seed, on_call, numbers=played)

    if played:
        _record(play, len(played), finished)


def record_policy(
    actor: Actor,
    groups: Sequence[VectorEnv],
    numbers: range,
    finished: Callable[[RecordedEpisode], None],
) -> None:
    """Run the episodes of these numbers by ``actor``; ``finished`` gets them in their order."""
    listed = numbered_episodes(
        DEMONSTRATION_SEEDS, numbers.start, len(numbers), len(groups[0].spec.tasks)
    )

    def play(on_call: OnCall) -> None:
        play_episodes(partial(Stepwise, actor), groups, listed, on_call, Untimed())

    if numbers:
        _record(play, len(numbers), finished)


def _record(
    play: Callable[[OnCall], None], count: int, finished: Callable[[RecordedEpisode], None]
) -> None:
    """Call ``finished`` with each of the ``count`` episodes that ``play`` plays, in their order."""
    rows = EpisodeRows(count)
    waiting = dict[int, RecordedEpisode]()
    following = 0

    def on_call(env: VectorEnv, call: Call, index: Tensor) -> None:
        nonlocal following
        rows.add(index, _frame(call))
        done, failed = call.result.done.tolist(), call.result.failed.tolist()
        for slot, number in enumerate(index.tolist()):
            if number >= 0 and done[slot]:
                frames = {key: value.numpy() for key, value in rows.take(number).items()}
                success = bool(frames[form.SUCCESS][-1])
                waiting[number] = RecordedEpisode(
                    frames, call.observation.instruction[slot], success, failed[slot]
                )
        while following in waiting:
            finished(waiting.pop(following))
            following += 1

    play(on_call)


def _frame(call: Call) -> Tensors:
    """Return the frame of each environment, ``[B, *shape]``: observation, action and outcome."""
    result = call.result
    values = {
        form.STATE: call.observation.state,
        form.ACTION: call.sample.actions[:, 0],
        form.REWARD: result.reward[:, 0],
        form.DONE: result.done,
        form.TRUNCATED: (result.truncated & ~result.terminated)[
            :, 0
        ],  # reaching the goal at the time limit is no truncation
        form.SUCCESS: result.success[:, 0],
    }
    if LABEL in call.sample.latent:
        values[EXPERT_ACTION] = call.sample.latent[LABEL]
    values |= {form.IMAGES + name: images for name, images in call.observation.images.items()}
    return moved(values, CPU)

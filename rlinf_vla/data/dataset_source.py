"""Read the frames of a LeRobotDataset as inputs of a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlinf_vla.algorithms.base import DemonstrationConfig, WeightedDataset
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.devices import CPU, moved
from rlinf_vla.core.observation_features import require_colours
from rlinf_vla.core.protocols import EnvSpec, Learner, Policy, prepared
from rlinf_vla.core.types import Inputs, Observation
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.lerobot_columns import NUMBERS
from rlinf_vla.data.lerobot_reader import Episode, LeRobotReader

FRAMES_AT_ONCE = 32
"""Frames prepared or encoded at once, because an episode's may not fit in memory."""


def require_same_control_rate(path: str, environments: Iterable[EnvSpec]) -> None:
    """Raises UserError on unequal control rates: actions would have a different effect."""
    fps = LeRobotReader(Path(path).expanduser()).fps
    for spec in environments:
        if abs(spec.control_hz - fps) > 0.01 * fps:
            raise UserError(
                f"{path} has {fps:g} steps per second, the environment {spec.control_hz:g}: a policy trained at one rate fails at "
                "the other; use an environment of that control rate, or a dataset recorded at this one"
            )


def require_rewards(path: str) -> None:
    """Raise UserError if a dataset is unreadable or has no rewards, without reading its frames."""
    reader = LeRobotReader(Path(path).expanduser())
    if form.REWARD not in reader.features:
        raise UserError(
            f"algorithm.dataset={path} has no rewards ({form.REWARD}): choose a dataset that has, or imitate this one with algorithm=sft"
        )


class DatasetSource:
    """Read a dataset's frames as inputs of a policy."""

    def __init__(
        self,
        policy: Learner,
        path: str,
        action_key: str,
        state_key: str,
        cameras: Sequence[str],
        key: str,
    ) -> None:
        """``cameras``: ``POLICY_NAME:DATASET_NAME`` where they differ; ``key``: the recipe key."""
        self.policy = policy
        self.reader = LeRobotReader(Path(path).expanduser())
        self._action_key = action_key
        self._state = [state_key] if policy.spec.state_dim else []
        self.all_succeed = False
        for column, size, what in (
            (action_key, policy.spec.action_dim, "actions"),
            (state_key, policy.spec.state_dim, "state"),
        ):
            if size:
                self._require_numbers(column, size, f"the policy's {what} {size} dimensions")
        require_colours(policy.spec.images, "a LeRobotDataset")
        called = {name: name for name in policy.spec.images}
        for camera in cameras:
            name, _, of_dataset = camera.partition(":")
            if name not in called or not of_dataset:
                raise UserError(
                    f"{key}: {camera!r} must be POLICY_CAMERA:DATASET_CAMERA, the former one of {sorted(called)}"
                )
            called[name] = of_dataset
        self._cameras = {name: self._camera(name, called[name], key) for name in called}

    @classmethod
    def of_demonstrations(cls, policy: Learner, entry: WeightedDataset, node: str) -> DatasetSource:
        """``entry``: without nulls; ``node``: the recipe node that has its keys."""
        assert entry.action_key and entry.state_key and entry.cameras is not None
        source = cls(
            policy,
            entry.dataset,
            entry.action_key,
            entry.state_key,
            entry.cameras,
            f"{node}.cameras",
        )
        source.all_succeed = bool(entry.all_succeed)
        return source

    def _camera(self, name: str, called: str, key: str) -> str:
        camera = self.reader.camera(called)
        if camera is None:
            names = [form.short_name(feature) for feature in self.reader.cameras]
            raise UserError(
                f"{self.reader.directory} has cameras {names} and no {called!r}: choose one with {key}=[{name}:NAME]"
            )
        size = self.policy.spec.images[name]
        (height, width) = self.reader.features[camera].image_size
        if height < size[0] or width < size[1]:
            raise UserError(
                f"the policy's image {name!r} is {size[0]}x{size[1]} pixels, {camera} of {self.reader.directory} only {height}x{width}"
            )
        return camera

    def episodes(
        self, columns: list[str], progress: Callable[[float], None] = lambda _: None
    ) -> Iterator[Episode]:
        """Yield every episode: actions, state if the policy uses it, and ``columns`` of one number
        per frame."""
        for column in columns:
            self._require_numbers(column, 1, "it needs one number per frame")
        for number in range(len(self.reader)):
            yield self.reader.episode(number, [self._action_key, *self._state, *columns])
            progress((number + 1) / len(self.reader))

    def ended(
        self, columns: list[str], progress: Callable[[float], None] = lambda _: None
    ) -> Iterator[tuple[Episode, bool]]:
        """Yield every episode as ``episodes`` does, and whether it succeeded.

        It did if ``next.success`` is true of any frame. Raises UserError without this column,
        unless every episode succeeds (``all_succeed``).
        """
        flags = [] if self.all_succeed else [form.SUCCESS]
        if flags and form.SUCCESS not in self.reader.features:
            raise UserError(
                f"{self.reader.directory} does not record success ({form.SUCCESS}): if all its episodes succeed, set all_succeed=true of it"
            )
        for episode in self.episodes([*columns, *flags], progress):
            yield episode, self.all_succeed or bool(episode.columns[form.SUCCESS].any())

    def _require_numbers(self, column: str, size: int, requirement: str) -> None:
        """Raise UserError if a feature of the dataset is not ``size`` numbers."""
        feature = self.reader.feature(column)
        if feature.dtype not in NUMBERS:
            raise UserError(
                f"{self.reader.directory}: {column} is {feature.dtype}, numbers are needed: choose another column"
            )
        if feature.shape != (size,):
            raise UserError(
                f"{self.reader.directory}: {column} has shape {list(feature.shape)}, {requirement}: they must match"
            )

    def actions(self, episode: Episode) -> Tensor:
        """Return actions, float32 ``[L, D]``."""
        return torch.from_numpy(episode.vectors(self._action_key)).float()

    def inputs(self, episode: Episode, augmented: bool = False) -> Inputs:
        """Return the prepared inputs of every frame, ``[L, ...]``; ``augmented``: to augment."""
        streams = {name: self.reader.frames(episode, key) for name, key in self._cameras.items()}
        nothing = np.zeros((len(episode), 0), np.float32)
        state = torch.from_numpy(
            episode.vectors(self._state[0]) if self._state else nothing
        ).float()
        parts = []
        for first in range(0, len(episode), FRAMES_AT_ONCE):
            rows = slice(first, first + FRAMES_AT_ONCE)
            images = {
                name: np.stack(list(islice(stream, len(state[rows]))))
                for name, stream in streams.items()
            }
            seen = {name: torch.from_numpy(frames) for name, frames in images.items()}
            parts.append(
                moved(
                    prepared(
                        self.policy,
                        Observation(seen, state[rows], episode.instruction[rows]),
                        augmented,
                    ),
                    CPU,
                )
            )
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def open_mixture(policy: Policy, config: DemonstrationConfig) -> list[tuple[DatasetSource, float]]:
    """Return the datasets and the share of a batch that each has, which sum to 1.

    Raises UserError if one is unreadable, does not fit the policy or lacks
    ``config.advantage_key``, or unless they have one control rate.
    """
    entries = config.datasets
    sources = [
        DatasetSource.of_demonstrations(policy, entry, node) for node, entry in entries.items()
    ]
    label = config.advantage_key
    for reader in (source.reader for source in sources):
        if label and label not in reader.features:
            raise UserError(
                f"{reader.directory} has no feature {label}: label it with `rlinf-vla label`"
            )
    first = sources[0].reader
    for reader in (source.reader for source in sources[1:]):
        if abs(reader.fps - first.fps) > 0.01 * first.fps:
            raise UserError(
                f"{reader.directory} has {reader.fps:g} steps per second, {first.directory} {first.fps:g}: "
                "a mixture needs datasets of one control rate"
            )
    total = sum(entry.weight for entry in entries.values())
    shares = [entry.weight / total for entry in entries.values()]
    return list(zip(sources, shares, strict=True))


def part_of(progress: Callable[[float], None], number: int, count: int) -> Callable[[float], None]:
    """Return the progress of part ``number`` of ``count`` equal ones."""
    return lambda fraction: progress((number + fraction) / count)

"""Read a LeRobotDataset as demonstrations, labelled frames or replay transitions of a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlinf_vla.algorithms.advantages import chunk_rewards
from rlinf_vla.algorithms.base import DEMONSTRATIONS, DemonstrationConfig, WeightedDataset
from rlinf_vla.algorithms.classifier import Frames
from rlinf_vla.algorithms.off_policy import OffPolicyConfig
from rlinf_vla.algorithms.sft import Demonstrations
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.devices import CPU, moved
from rlinf_vla.core.observation_features import require_colours
from rlinf_vla.core.protocols import (
    EnvSpec,
    Learner,
    Policy,
    RewardModel,
    precompute_frozen,
    prepared,
)
from rlinf_vla.core.transitions import ACTED, ACTION, COST, DISCOUNT, REWARD, EpisodeRecords
from rlinf_vla.core.types import Inputs, Observation
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.lerobot_columns import NUMBERS
from rlinf_vla.data.lerobot_reader import Episode, LeRobotReader

_AT_ONCE = 32
"""Frames prepared or encoded at once, because an episode's may not fit in memory."""
_UNITS = 1 + 1e-3
"""Bound on SAC's actions, which lie in [-1, 1], plus rounding errors."""


def require_same_control_rate(path: str, environments: Iterable[EnvSpec]) -> None:
    """Raises UserError on unequal control rates: actions would have a different effect."""
    fps = LeRobotReader(Path(path).expanduser()).fps
    for spec in environments:
        if abs(spec.control_hz - fps) > 0.01 * fps:
            raise UserError(
                f"{path} has {fps:g} steps per second, the environment {spec.control_hz:g}: a policy trained at one rate fails at "
                "the other; use an environment of that control rate, or a dataset recorded at this one"
            )


def dataset_demonstrations(
    policy: Policy,
    config: DemonstrationConfig,
    progress: Callable[[float], None],
    augmented: bool = False,
) -> tuple[Demonstrations, float | None]:
    """Return every frame with its action chunk, and the share of successful episodes.

    ``augmented``: prepare them for ``Policy.augment``. Of a mixture, the frames have weights, and
    the share is the weighted mean of those of its datasets. It is None if a dataset does not record
    success. Raises UserError if a dataset is unreadable or does not fit the policy.
    """
    sources = {
        node: _Source.of_demonstrations(policy, entry, node)
        for node, entry in config.datasets.items()
    }
    _require_one_rate([source.reader for source in sources.values()])
    recorded = all(form.SUCCESS in source.reader.features for source in sources.values())

    def read(number: int, source: _Source) -> tuple[list[tuple[Inputs, Tensor]], float]:
        """Return the episodes of a dataset, and its share of successful ones."""
        shown: list[tuple[Inputs, Tensor]] = []
        successes = 0

        def part(fraction: float) -> None:
            progress((number + fraction) / len(sources))

        for episode in source.episodes([form.SUCCESS] if recorded else [], part):
            shown.append((source.inputs(episode, augmented), source.actions(episode)))
            successes += recorded and bool(episode.columns[form.SUCCESS].any())
        return shown, successes / len(shown)

    total = sum(entry.weight for entry in config.datasets.values())
    episodes: list[tuple[Inputs, Tensor]] = []
    weights = []
    success = 0.0
    for number, (node, source) in enumerate(sources.items()):
        share = config.datasets[node].weight / total
        shown, succeeded = read(number, source)
        frames = sum(len(actions) for _, actions in shown)
        weights.append(torch.full((frames,), share / frames, dtype=torch.float64))
        episodes += shown
        success += share * succeeded
    demonstrations = Demonstrations.of(episodes, policy.horizon)
    if len(sources) > 1:
        demonstrations = replace(demonstrations, weight=torch.cat(weights))
    return demonstrations, success if recorded else None


def _require_one_rate(readers: Sequence[LeRobotReader]) -> None:
    """Raise UserError unless the datasets of a mixture have one control rate."""
    for reader in readers[1:]:
        if abs(reader.fps - readers[0].fps) > 0.01 * readers[0].fps:
            raise UserError(
                f"{reader.directory} has {reader.fps:g} steps per second, {readers[0].directory} {readers[0].fps:g}: "
                "a mixture needs datasets of one control rate"
            )


@torch.no_grad()
def dataset_frames(
    model: RewardModel, config: DemonstrationConfig, progress: Callable[[float], None]
) -> Frames:
    """Return every frame, labelled by ``next.success`` of its row, as LeRobot does.

    Raises UserError if the dataset is unreadable, does not fit the model or lacks this column, or
    if there are several.
    """
    if len(config.datasets) > 1:
        raise UserError(
            f"{DEMONSTRATIONS}.mixture: half the frames of a classifier's batch show success, whatever the weights: give one dataset"
        )
    ((node, entry),) = config.datasets.items()
    source = _Source.of_demonstrations(model, entry, node)
    parts = []
    for episode in source.episodes([form.SUCCESS], progress):
        success = torch.from_numpy(episode.columns[form.SUCCESS]).bool()
        parts.append(
            (
                source.inputs(episode),
                success,
                torch.full_like(success, episode.number, dtype=torch.int64),
            )
        )
    inputs, successes, numbers = zip(*parts, strict=True)
    return Frames(
        {name: torch.cat([tensors[name] for tensors in inputs]) for name in inputs[0]},
        torch.cat(successes),
        torch.cat(numbers),
    )


@torch.no_grad()
def dataset_transitions(policy: Policy, config: OffPolicyConfig) -> Iterator[EpisodeRecords]:
    """Yield episodes as replay records, one per action chunk.

    A dataset does not contain the observation after an episode's last action. If the episode
    terminated, that action is still a transition, with a discount of 0. If it was truncated, the
    last frame is an observation only. Terminated means ``next.done`` without ``next.truncated`` in
    the last frame; if either column is missing, ``next.success`` there; and without that column
    too, ``next.done`` with a positive reward, as LeRobot's recorder for HIL-SERL ends a success.

    Raises UserError if the dataset is unreadable or does not fit, or actions exceed [-1, 1].
    """
    assert config.dataset is not None
    source = _Source(
        policy,
        config.dataset,
        form.ACTION,
        form.STATE,
        config.dataset_cameras,
        "algorithm.dataset_cameras",
    )
    ends = [
        key for key in (form.DONE, form.TRUNCATED, form.SUCCESS) if key in source.reader.features
    ]
    for episode in source.episodes([form.REWARD, *ends]):
        terminated = _terminated(episode)
        steps = len(episode) - (not terminated)
        if steps:
            success = (
                bool(episode.columns[form.SUCCESS].any())
                if form.SUCCESS in ends
                else terminated and form.TRUNCATED not in ends
            )
            yield EpisodeRecords(
                _records(policy, source, episode, steps, terminated, config), success, steps
            )


def _terminated(episode: Episode) -> bool:
    last = {
        key: bool(values[-1])
        for key, values in episode.columns.items()
        if key in (form.DONE, form.TRUNCATED, form.SUCCESS)
    }
    if form.DONE in last and form.TRUNCATED in last:
        return last[form.DONE] and not last[form.TRUNCATED]
    return (
        last[form.SUCCESS]
        if form.SUCCESS in last
        else last.get(form.DONE, False) and float(episode.columns[form.REWARD][-1]) > 0
    )


def _records(
    policy: Policy,
    source: _Source,
    episode: Episode,
    steps: int,
    terminated: bool,
    config: OffPolicyConfig,
) -> dict[str, Tensor]:
    """See :class:`EpisodeRecords`; ``steps``: number of actions whose outcome is known."""
    actions = source.actions(episode)
    if float(actions.abs().max()) > _UNITS:
        raise UserError(
            f"{source.reader.directory}: actions of episode {episode.number} reach {float(actions.abs().max()):.3g}, outside "
            "SAC's range [-1, 1]: record them in the environment's units"
        )
    call = torch.arange(0, steps, policy.spec.chunk)
    step = call[:, None] + torch.arange(policy.spec.chunk)
    valid = step < steps
    step = step.clamp(max=steps - 1)
    reward = torch.from_numpy(episode.columns[form.REWARD]).float()
    earned, discount = chunk_rewards(reward[step], valid, config.gamma, config.gamma_unit)
    # a dataset has no column of costs
    acted = torch.ones_like(discount, dtype=torch.bool)
    cost = torch.zeros_like(earned)
    done = {
        ACTION: actions[step].clamp(-1, 1),
        REWARD: earned,
        DISCOUNT: discount,
        ACTED: acted,
        COST: cost,
    }
    if terminated:
        done[DISCOUNT][-1] = 0
    else:
        call = torch.cat([call, torch.tensor([steps])])
        done = {
            name: torch.cat([value, torch.zeros_like(value[:1])]) for name, value in done.items()
        }
    inputs = {name: value[call] for name, value in source.inputs(episode).items()}
    return moved(precompute_frozen(policy, inputs, _AT_ONCE), CPU) | done


class _Source:
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
    def of_demonstrations(cls, policy: Learner, entry: WeightedDataset, node: str) -> _Source:
        """``entry``: without nulls; ``node``: the recipe node that has its keys."""
        assert entry.action_key and entry.state_key and entry.cameras is not None
        return cls(
            policy,
            entry.dataset,
            entry.action_key,
            entry.state_key,
            entry.cameras,
            f"{node}.cameras",
        )

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

    def _require_numbers(self, column: str, size: int, requirement: str) -> None:
        """Raise UserError if a feature of the dataset is not ``size`` numbers."""
        feature = self.reader.features.get(column)
        if feature is not None and feature.dtype not in NUMBERS:
            raise UserError(
                f"{self.reader.directory}: {column} is {feature.dtype}, numbers are needed: choose another column"
            )
        if feature is not None and feature.shape != (size,):
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
        for first in range(0, len(episode), _AT_ONCE):
            rows = slice(first, first + _AT_ONCE)
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

"""What a LeRobotDataset holds, as a policy learns from it: demonstrations to imitate, transitions for a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlinf_vla.algorithms.advantages import chunk_rewards
from rlinf_vla.algorithms.classifier import Frames
from rlinf_vla.algorithms.sac import ACTED, ACTION, DISCOUNT, REWARD, SACConfig
from rlinf_vla.algorithms.sft import DemonstrationConfig, Demonstrations
from rlinf_vla.datasets import lerobot_format as form
from rlinf_vla.datasets.lerobot_reader import Episode, LeRobotReader
from rlinf_vla.protocols import EnvSpec, Learner, Policy, RewardModel
from rlinf_vla.rollout.transitions import Recorded
from rlinf_vla.types import Inputs, Observation, UserError

_AT_ONCE = 32
"""Frames that a policy prepares together: an episode's images need not lie in memory whole."""
_UNITS = 1 + 1e-3
"""Actions of SAC lie in [-1, 1]; so far a rounding error may lead."""


def refuse_another_pace(path: str, environments: Iterable[EnvSpec]) -> None:
    """Raises UserError where a step of the dataset is not as long as one of the environments: the same actions would do something else."""
    fps = LeRobotReader(Path(path).expanduser()).fps
    for spec in environments:
        if abs(spec.control_hz - fps) > 0.01 * fps:
            raise UserError(
                f"{path} has {fps:g} steps per second, the environment {spec.control_hz:g}: what is learnt at one pace fails at "
                "the other; use an environment of that control rate, or a dataset recorded at this one"
            )


def dataset_demonstrations(
    policy: Policy, config: DemonstrationConfig, progress: Callable[[float], None]
) -> tuple[Demonstrations, float | None]:
    """Every frame with the actions from there on; and the share of episodes that succeeded, None where nothing says so.

    Raises UserError where the dataset cannot be read or does not fit the policy.
    """
    assert config.dataset is not None
    source = _Source(policy, config.dataset, config.action_key, config.cameras, "algorithm.demonstrations.cameras")
    said = [form.SUCCESS] if form.SUCCESS in source.reader.features else []
    episodes, successes = [], []
    for number in range(len(source.reader)):
        episode = source.episode(number, said)
        episodes.append((source.inputs(episode), source.actions(episode)))
        successes += [bool(episode.columns[key].any()) for key in said]
        progress((number + 1) / len(source.reader))
    return Demonstrations.of(episodes, policy.spec.chunk), sum(successes) / len(successes) if successes else None


@torch.no_grad()
def dataset_frames(model: RewardModel, config: DemonstrationConfig, progress: Callable[[float], None]) -> Frames:
    """Every frame, and what ``next.success`` says in its row (as LeRobot's own reward classifiers are labelled).

    Raises UserError where the dataset cannot be read, does not fit the model or does not say what succeeded.
    """
    assert config.dataset is not None
    source = _Source(model, config.dataset, config.action_key, config.cameras, "algorithm.demonstrations.cameras")
    parts = []
    for number in range(len(source.reader)):
        episode = source.episode(number, [form.SUCCESS])
        success = torch.from_numpy(episode.columns[form.SUCCESS]).bool()
        parts.append((source.inputs(episode), success, torch.full_like(success, number, dtype=torch.int64)))
        progress((number + 1) / len(source.reader))
    inputs, successes, numbers = zip(*parts, strict=True)
    return Frames({name: torch.cat([each[name] for each in inputs]) for name in inputs[0]}, torch.cat(successes), torch.cat(numbers))


@torch.no_grad()
def dataset_transitions(policy: Policy, config: SACConfig) -> Iterator[Recorded]:
    """Its episodes as records, each a chunk of actions.

    A dataset does not show what an episode's last action led to. Where the episode terminated there nothing is worth anything any more, and
    the action is a transition; where it was cut, the last frame only says what was seen. It terminated if ``next.done`` and not
    ``next.truncated``, or, without the latter, if ``next.success``, in its last frame.

    Raises UserError where the dataset cannot be read or does not fit, or its actions leave [-1, 1].
    """
    assert config.dataset is not None
    source = _Source(policy, config.dataset, form.ACTION, config.dataset_cameras, "algorithm.dataset_cameras")
    ends = [key for key in (form.DONE, form.TRUNCATED, form.SUCCESS) if key in source.reader.features]
    for number in range(len(source.reader)):
        episode = source.episode(number, [form.REWARD, *ends])
        terminated = _terminated(episode)
        steps = len(episode) - (not terminated)
        if steps:
            success = form.SUCCESS in ends and bool(episode.columns[form.SUCCESS].any())
            yield Recorded(_records(policy, source, episode, steps, terminated, config), success, steps)


def _terminated(episode: Episode) -> bool:
    last = {key: bool(values[-1]) for key, values in episode.columns.items() if key in (form.DONE, form.TRUNCATED, form.SUCCESS)}
    if form.DONE in last and form.TRUNCATED in last:
        return last[form.DONE] and not last[form.TRUNCATED]
    return last.get(form.SUCCESS, False)


def _records(policy: Policy, source: _Source, episode: Episode, steps: int, terminated: bool, config: SACConfig) -> dict[str, Tensor]:
    """See :class:`Recorded`; ``steps``: of the episode's actions, those whose consequences are known."""
    actions = source.actions(episode)
    if float(actions.abs().max()) > _UNITS:
        raise UserError(
            f"{source.reader.directory}: actions of episode {episode.number} reach {float(actions.abs().max()):.3g}, SAC's lie in [-1, 1]: "
            "record them in the environment's units"
        )
    call = torch.arange(0, steps, policy.spec.chunk)
    step = call[:, None] + torch.arange(policy.spec.chunk)
    valid, step = (step < steps).to(actions.device), step.clamp(max=steps - 1)
    reward = torch.from_numpy(episode.columns[form.REWARD]).float().to(actions.device)
    earned, discount = chunk_rewards(reward[step], valid, config.gamma, config.gamma_unit)
    done = {ACTION: actions[step].clamp(-1, 1), REWARD: earned, DISCOUNT: discount, ACTED: torch.ones_like(discount, dtype=torch.bool)}
    if terminated:
        done[DISCOUNT][-1] = 0
    else:
        call = torch.cat([call, torch.tensor([steps])])
        done = {name: torch.cat([value, torch.zeros_like(value[:1])]) for name, value in done.items()}
    inputs = {name: value[call.to(value.device)] for name, value in source.inputs(episode).items()}
    return policy.fix(inputs) | done


class _Source:
    """A dataset whose frames a policy can look at."""

    def __init__(self, policy: Learner, path: str, action_key: str, cameras: Sequence[str], key: str) -> None:
        """``cameras``: ``policy's name:dataset's name`` where they differ; ``key``: of the recipe, where they stand."""
        self.policy, self.reader, self._action_key = policy, LeRobotReader(Path(path).expanduser()), action_key
        self._device = next(policy.parameters()).device
        self._state = [form.STATE] if policy.spec.state_dim else []
        for column, size, what in ((action_key, policy.spec.action_dim, "actions"), (form.STATE, policy.spec.state_dim, "state")):
            feature = self.reader.features.get(column)
            if feature is not None and size and feature.shape != (size,):
                raise UserError(f"{path}: {column} has shape {list(feature.shape)}, the policy's {what} {size} dimensions: they do not fit")
        called = {name: name for name in policy.spec.images}
        for each in cameras:
            name, _, of_dataset = each.partition(":")
            if name not in called or not of_dataset:
                raise UserError(f"{key}: {each!r} is not one of the policy's cameras {sorted(called)}, a colon, and one of the dataset's")
            called[name] = of_dataset
        self._cameras = {name: self._camera(name, called[name], key) for name in called}

    def _camera(self, name: str, called: str, key: str) -> str:
        found = self.reader.camera(called)
        if found is None:
            known = [form.short_name(each) for each in self.reader.cameras]
            raise UserError(f"{self.reader.directory} has cameras {known} and no {called!r}: say which is meant with {key}=[{name}:NAME]")
        size, (height, width) = self.policy.spec.images[name], self.reader.features[found].image_size
        if height < size[0] or width < size[1]:
            raise UserError(
                f"the policy's image {name!r} is {size[0]}x{size[1]} pixels, {found} of {self.reader.directory} only {height}x{width}"
            )
        return found

    def episode(self, number: int, columns: list[str]) -> Episode:
        """With actions and, where the policy reads it, state."""
        return self.reader.episode(number, [self._action_key, *self._state, *columns])

    def actions(self, episode: Episode) -> Tensor:
        """float32 ``[L, D]``."""
        return torch.from_numpy(episode.columns[self._action_key]).float().to(self._device)

    def inputs(self, episode: Episode) -> Inputs:
        """Of every frame, prepared, ``[L, ...]``."""
        streams = {name: self.reader.frames(episode, key) for name, key in self._cameras.items()}
        nothing = np.zeros((len(episode), 0), np.float32)
        state = torch.from_numpy(episode.columns[form.STATE] if self._state else nothing).float().to(self._device)
        parts = []
        for first in range(0, len(episode), _AT_ONCE):
            rows = slice(first, first + _AT_ONCE)
            images = {name: np.stack(list(islice(stream, len(state[rows])))) for name, stream in streams.items()}
            seen = {name: torch.from_numpy(frames).to(self._device) for name, frames in images.items()}
            parts.append(self.policy.prepare(Observation(seen, state[rows], episode.instruction[rows])))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

"""Read a LeRobotDataset as demonstrations, labelled frames or replay transitions of a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from rlinf_vla.algorithms.advantages import chunk_rewards
from rlinf_vla.algorithms.base import DEMONSTRATIONS, DemonstrationConfig
from rlinf_vla.algorithms.classifier import Frames
from rlinf_vla.algorithms.conditions import told
from rlinf_vla.algorithms.off_policy import OffPolicyConfig
from rlinf_vla.algorithms.sft import Demonstrations
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.devices import CPU, moved
from rlinf_vla.core.protocols import Policy, RewardModel, precompute_frozen
from rlinf_vla.core.transitions import ACTED, ACTION, COST, DISCOUNT, REWARD, EpisodeRecords
from rlinf_vla.core.types import Inputs
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.dataset_source import FRAMES_AT_ONCE, DatasetSource, open_mixture, part_of
from rlinf_vla.data.lerobot_reader import Episode

_UNITS = 1 + 1e-3
"""Bound on SAC's actions, which lie in [-1, 1], plus rounding errors."""


def dataset_demonstrations(
    policy: Policy,
    config: DemonstrationConfig,
    progress: Callable[[float], None],
    augmented: bool = False,
) -> tuple[Demonstrations, float | None]:
    """Return every frame with its action chunk, and the share of successful episodes.

    ``augmented``: prepare them for ``Policy.augment``. Of a mixture, the frames have weights, and
    the share is the weighted mean of those of its datasets. It is None if a dataset does not record
    success. With ``config.advantage_key``, the instructions tell the label of each frame. Raises
    UserError if a dataset is unreadable or does not fit the policy.
    """
    mixture = open_mixture(policy, config)
    sources = [source for source, _ in mixture]
    label = config.advantage_key
    recorded = all(form.SUCCESS in source.reader.features for source in sources)

    def read(number: int, source: DatasetSource) -> tuple[list[tuple[Inputs, Tensor]], float]:
        """Return the episodes of a dataset, and its share of successful ones."""
        shown: list[tuple[Inputs, Tensor]] = []
        episodes = successes = 0
        columns = [form.SUCCESS] if recorded or config.only_successes else []
        part = part_of(progress, number, len(sources))
        for episode in source.episodes([*columns, *([label] if label else [])], part):
            success = form.SUCCESS in columns and bool(episode.columns[form.SUCCESS].any())
            episodes += 1
            successes += success
            if config.only_successes and not success:
                continue
            if label:
                positive = episode.columns[label].tolist()
                if not {0, 1}.issuperset(positive):
                    raise UserError(
                        f"{source.reader.directory}: {label} is neither true nor false in episode {episode.number}, so it is no label"
                    )
                instruction = [
                    told(*pair) for pair in zip(episode.instruction, positive, strict=True)
                ]
                episode = replace(episode, instruction=instruction)
            shown.append((source.inputs(episode, augmented), source.actions(episode)))
        if not shown:
            raise UserError(
                f"{source.reader.directory}: none of its {episodes} episodes succeeds, and algorithm.demonstrations.only_successes=true"
            )
        return shown, successes / episodes

    episodes: list[tuple[Inputs, Tensor]] = []
    weights = []
    success = 0.0
    for number, (source, share) in enumerate(mixture):
        shown, succeeded = read(number, source)
        frames = sum(len(actions) for _, actions in shown)
        weights.append(torch.full((frames,), share / frames, dtype=torch.float64))
        episodes += shown
        success += share * succeeded
    demonstrations = Demonstrations.of(episodes, policy.horizon)
    if len(sources) > 1:
        demonstrations = replace(demonstrations, weight=torch.cat(weights))
    return demonstrations, success if recorded else None


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
    source = DatasetSource.of_demonstrations(model, entry, node)
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
    source = DatasetSource(
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
    source: DatasetSource,
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
    return moved(precompute_frozen(policy, inputs, FRAMES_AT_ONCE), CPU) | done

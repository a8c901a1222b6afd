"""Convert a robot episode to replay records: one per inference, over the steps that it moved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_vla.core.transitions import ACTED, ACTION, COST, DISCOUNT, REWARD, EpisodeRecords
from rlinf_vla.core.types import Inputs, Tensors
from rlinf_vla.features.realworld.arm_convention import ArmConvention
from rlinf_vla.features.realworld.episode import RobotEpisode


@dataclass(frozen=True)
class RecordForm:
    """What a policy's replay records contain.

    chunk: actions per inference. convention: of its actions. noise: the actor chooses the noise of
    a frozen policy (DSRL), which an operator's actions do not have.
    """

    chunk: int
    convention: ArmConvention
    noise: bool
    gamma: float


def training_records(
    episode: RobotEpisode, inputs: Inputs, form: RecordForm
) -> list[EpisodeRecords]:
    """Return the records of all steps. ``inputs``: of the ``N + 1`` observations, ``[N + 1, ...]``.

    If the actor chooses noise, steps of the operator are left out.
    """
    spans = runs(~episode.human) if form.noise else [(0, len(episode))]
    return [to_records(episode, inputs, form, start, end) for start, end in spans]


def operator_records(
    episode: RobotEpisode, inputs: Inputs, form: RecordForm
) -> list[EpisodeRecords]:
    """Return each run of operator actions as an episode, cut where the policy resumed."""
    return (
        []
        if form.noise
        else [to_records(episode, inputs, form, start, end) for start, end in runs(episode.human)]
    )


def to_records(
    episode: RobotEpisode, inputs: Inputs, form: RecordForm, start: int, end: int
) -> EpisodeRecords:
    """Return the records of the steps from ``start`` to before ``end``, at least one.

    A record is a step of a semi-Markov decision process (Sutton, Precup and Singh 1999): the
    discounted rewards and costs of at most ``form.chunk`` executed actions, and ``gamma`` to the
    power of the control periods until the next record; held periods count. A chunk that was not
    executed to its end repeats its last action, as ``dataset_transitions`` does.
    """
    first = torch.tensor([*_decisions(episode, form.chunk, start, end), end])
    calls = len(first) - 1
    step = first[:-1, None] + torch.arange(form.chunk)
    valid = step < first[1:, None]
    last = step.minimum(first[1:, None] - 1)
    waited = episode.tick[last] - episode.tick[first[:-1], None]
    terminated = episode.terminated and end == len(episode)
    reward, cost = (
        (form.gamma ** waited.float() * series[last] * valid).sum(1)
        for series in (episode.reward, episode.cost)
    )
    acted: Tensors = {
        ACTION: episode.chosen[first[:-1]]
        if form.noise
        else form.convention.to_policy(episode.action[last]),
        REWARD: reward,
        COST: cost,
        DISCOUNT: form.gamma ** torch.diff(episode.tick[first]).float(),
        ACTED: torch.ones(calls, dtype=torch.bool),
    }
    if terminated:
        acted[DISCOUNT][-1] = 0
        first = first[:-1]
    else:
        acted = {
            name: torch.cat([value, torch.zeros_like(value[:1])]) for name, value in acted.items()
        }
    success = episode.success and end == len(episode)
    paid = float(episode.cost[start:end].sum())
    return EpisodeRecords(
        {name: value[first] for name, value in inputs.items()} | acted, success, end - start, paid
    )


def _decisions(episode: RobotEpisode, chunk: int, start: int, end: int) -> Iterator[int]:
    """Yield the steps at which a record begins: an inference, a change of hands, or a chunk ago."""
    began = start
    for step in range(start, end):
        changed = step > start and bool(
            episode.begins[step] or episode.human[step] != episode.human[step - 1]
        )
        if step == start or changed or step - began == chunk:
            began = step
            yield step


def runs(where: Tensor) -> Iterator[tuple[int, int]]:
    """Yield start and end of each run of true values in bool ``[N]``."""
    edges = torch.diff(
        where.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int)
    )
    starts, ends = (torch.nonzero(edges == change)[:, 0].tolist() for change in (1, -1))
    yield from zip(starts, ends, strict=True)

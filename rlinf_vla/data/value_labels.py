"""Read recorded episodes for a model of values, and label them with what it predicts.

After RECAP (π*0.6, arXiv 2511.14759).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from rlinf_vla.algorithms.advantage_labels import advantages, best, longest_of, returns_to_go
from rlinf_vla.algorithms.base import DemonstrationConfig, WeightedDataset
from rlinf_vla.algorithms.value import Returns, ValuePolicy
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.devices import device_of, moved
from rlinf_vla.core.protocols import Policy
from rlinf_vla.data.dataset_source import FRAMES_AT_ONCE, DatasetSource, open_mixture, part_of
from rlinf_vla.data.lerobot_format import Column, Feature
from rlinf_vla.data.lerobot_reader import LeRobotReader

RETURN = "return"
VALUE = "value"
ADVANTAGE = "advantage"
POSITIVE = "advantage_positive"
FEATURES = {
    RETURN: Feature("float32", (1,)),
    VALUE: Feature("float32", (1,)),
    ADVANTAGE: Feature("float32", (1,)),
    POSITIVE: Feature("bool", (1,)),
}
"""The features of a labelled dataset: the normalised return, what the model predicts of it, the
advantage of the next actions, and whether it is among the best of the task."""


def dataset_returns(
    policy: Policy,
    config: DemonstrationConfig,
    failure: float,
    progress: Callable[[float], None] = lambda fraction: None,
) -> tuple[Returns, dict[str, int]]:
    """Return every frame with its normalised return, and the steps of each task's longest episode.

    ``failure``: as of ``returns_to_go``. Raises UserError if a dataset is unreadable, does not fit
    the policy or does not record success.
    """
    mixture = open_mixture(policy, config)
    inputs, tasks, succeeded, weights = [], [], [], []
    for number, (source, share) in enumerate(mixture):
        frames = sum(length for length, _ in source.reader.listed())
        for episode, success in source.ended([], part_of(progress, number, len(mixture))):
            inputs.append(source.inputs(episode))
            tasks.append(episode.instruction[0])
            succeeded.append(success)
            weights.append(torch.full((len(episode),), share / frames, dtype=torch.float64))
    lengths = [len(weight) for weight in weights]
    longest = longest_of(tasks, lengths)
    returns = [
        returns_to_go(length, success, longest[task], failure)
        for length, success, task in zip(lengths, succeeded, tasks, strict=True)
    ]
    labelled = Returns(
        {name: torch.cat([seen[name] for seen in inputs]) for name in inputs[0]},
        torch.cat(returns),
        torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        torch.cat(weights) if len(mixture) > 1 else None,
    )
    return labelled, longest


@dataclass(frozen=True)
class Labelling:
    """How a dataset is labelled.

    failure: as of ``returns_to_go``. longest: steps of the longest episode that the model knows, by
    task; of other tasks it is the dataset's. steps: actions whose advantage counts. positive: share
    of a task's frames that are labelled positive. human: feature that is true where a person acted,
    whose frames are positive whatever their advantage; None: there is none.
    """

    failure: float
    longest: dict[str, int]
    steps: int
    positive: float
    human: str | None = None


@torch.no_grad()
def value_labels(
    model: ValuePolicy,
    datasets: Sequence[WeightedDataset],
    labelling: Labelling,
    progress: Callable[[float], None] = lambda fraction: None,
) -> list[tuple[LeRobotReader, list[dict[str, Column]]]]:
    """Return the reader of each dataset and the values ``[L]`` of ``FEATURES`` by episode.

    The best are those of all ``datasets`` together, which are without nulls. Raises UserError if
    one is unreadable, does not fit the model, or does not record success.
    """
    human = labelling.human
    tasks, succeeded, values, people = [], [], [], []
    sources = [DatasetSource.of_demonstrations(model, dataset, "label") for dataset in datasets]
    for number, source in enumerate(sources):
        if human is not None and human not in source.reader.features:
            raise UserError(
                f"{source.reader.directory} has no feature {human}: leave human_key out, or name the one that is true where a person acted"
            )
        part = part_of(progress, number, len(sources))
        for episode, success in source.ended([] if human is None else [human], part):
            tasks.append(episode.instruction[0])
            succeeded.append(success)
            values.append(_values(model, source.inputs(episode)))
            people.append(
                torch.zeros(len(episode), dtype=torch.bool)
                if human is None
                else torch.from_numpy(episode.columns[human]).bool()
            )
    longest = longest_of(tasks, [len(value) for value in values]) | labelling.longest
    returns = [
        returns_to_go(len(value), success, longest[task], labelling.failure).clamp(min=-1)
        for value, success, task in zip(values, succeeded, tasks, strict=True)
    ]
    gains = [
        advantages(earned, value, labelling.steps)
        for earned, value in zip(returns, values, strict=True)
    ]
    positive = best_of_tasks(tasks, gains, people, labelling.positive)
    columns = [
        dict(zip(FEATURES, (each.numpy() for each in episode), strict=True))
        for episode in zip(returns, values, gains, positive, strict=True)
    ]
    following = iter(columns)
    return [(source.reader, list(islice(following, len(source.reader)))) for source in sources]


def best_of_tasks(
    tasks: list[str], gains: list[Tensor], people: list[Tensor], share: float
) -> list[Tensor]:
    """Return which steps of each episode are among the best ``share`` of its task, bool ``[L]``.

    gains: advantages ``[L]``. people: bool ``[L]``, steps that are positive in any case.
    """
    positive = [torch.zeros_like(person) for person in people]
    for task in set(tasks):
        of_task = [number for number, name in enumerate(tasks) if name == task]
        chosen = best(
            torch.cat([gains[number] for number in of_task]),
            share,
            torch.cat([people[number] for number in of_task]),
        )
        parts = chosen.split([len(gains[number]) for number in of_task])
        for number, part in zip(of_task, parts, strict=True):
            positive[number] = part
    return positive


def _values(model: ValuePolicy, inputs: dict[str, Tensor]) -> Tensor:
    """Return the predictions of all rows, float32 ``[L]``, on the CPU."""
    rows = len(next(iter(inputs.values())))
    parts = []
    for first in range(0, rows, FRAMES_AT_ONCE):
        part = {name: value[first : first + FRAMES_AT_ONCE] for name, value in inputs.items()}
        parts.append(model.value(model.encode(moved(part, device_of(model)))).float().cpu())
    values = torch.cat(parts)
    if not values.isfinite().all():
        raise UserError(
            "the model's values are not finite: train it again, with a lower learning rate"
        )
    return values

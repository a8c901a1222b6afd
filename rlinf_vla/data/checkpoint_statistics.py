"""Compute what scales a policy's states and actions, and write it as checkpoints have it.

The quantiles are exact, over all frames, as in OpenVLA: the numbers of a dataset fit into memory,
where its images do not. openpi approximates them by histograms of 5,000 bins, which it rescales as
the range grows, and lerobot averages those of the episodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from rlinf_vla.algorithms.sft import action_chunks
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.io import replacing, write_json
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.lerobot_columns import NUMBERS
from rlinf_vla.data.lerobot_format import Column
from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.data.lerobot_statistics import Statistics, of_vectors

OPENPI, OPENVLA, LEROBOT = "openpi", "openvla", "lerobot"
FILES = {
    OPENPI: ("norm_stats.json",),
    OPENVLA: ("dataset_statistics.json",),
    LEROBOT: ("stats.json", "stats.safetensors"),
}
"""What is written for each family."""


@dataclass(frozen=True)
class Numbers:
    """Of one or several datasets: states ``[N, S]`` and actions ``[N, D]`` of all frames, float32
    as a policy learns from them, and the number of frames of each episode. ``S`` may be 0."""

    name: str
    states: Column
    actions: Column
    lengths: list[int]

    @classmethod
    def read(cls, directory: Path, action_key: str, state_key: str | None) -> Numbers:
        """Read a dataset. Raises UserError if it cannot be read, or a column is no vector."""
        reader = LeRobotReader(directory)
        keys = [action_key] if state_key is None else [action_key, state_key]
        for key in keys:
            feature = reader.features.get(key)
            if feature and (feature.dtype not in NUMBERS or len(feature.shape) != 1):
                raise UserError(
                    f"{directory}: {key} is {feature.dtype} {list(feature.shape)}, a vector of numbers is needed: choose another column"
                )
        episodes = [reader.episode(number, keys) for number in range(len(reader))]
        columns = {
            key: np.concatenate([episode.vectors(key) for episode in episodes]).astype(np.float32)
            for key in keys
        }
        actions = columns[action_key]
        states = actions[:, :0] if state_key is None else columns[state_key]
        return cls(directory.resolve().name, states, actions, list(map(len, episodes)))

    @classmethod
    def joined(cls, parts: Sequence[Numbers]) -> Numbers:
        """Join datasets. Raises UserError if they differ in their dimensions."""
        for part in parts[1:]:
            for what in ("states", "actions"):
                size, first = (getattr(each, what).shape[1] for each in (part, parts[0]))
                if size != first:
                    raise UserError(
                        f"{part.name} has {what} of {size} numbers, {parts[0].name} of {first}: give datasets of one robot"
                    )
        return cls(
            parts[0].name,
            np.concatenate([part.states for part in parts]),
            np.concatenate([part.actions for part in parts]),
            [length for part in parts for length in part.lengths],
        )

    def state_statistics(self) -> Statistics:
        return _of_dimensions(self.states.T)

    def action_statistics(self, horizon: int = 1, relative: Sequence[int] = ()) -> Statistics:
        """Return the statistics of all numbers of the chunks of ``horizon`` actions that begin at
        each frame. A dimension in ``relative`` is relative to the state at the chunk's begin."""
        return _of_dimensions(
            self._chunks(index, horizon, index in relative)
            for index in range(self.actions.shape[1])
        )

    def _chunks(self, index: int, horizon: int, relative: bool) -> Column:
        """Return one dimension of all chunks, ``[N * horizon]``."""
        chunks = torch.cat(
            [
                action_chunks(actions, horizon)
                for actions in torch.from_numpy(self.actions[:, index].copy()).split(self.lengths)
            ]
        )
        if relative:
            chunks = chunks - torch.from_numpy(self.states[:, index].copy())[:, None]
        return chunks.flatten().numpy()


def _of_dimensions(columns: Iterable[Column]) -> Statistics:
    """Return the statistics of vectors by dimension; only one is in memory at a time."""
    each = [of_vectors(column) for column in columns]
    return {
        name: each[0][name] if name == "count" else [found[name][0] for found in each]
        for name in each[0]
    }


def flags(mask: Sequence[int], size: int, what: str) -> list[bool]:
    """Return openpi's mask ``[6, -1]`` (six true, one false) as one flag per dimension; those
    beyond it are false. Raises UserError, which ``what`` begins, if it is longer than ``size``."""
    found = [count > 0 for count in mask for _ in range(abs(count))]
    if len(found) > size:
        raise UserError(
            f"{what}={list(mask)} covers {len(found)} dimensions, there are {size}: give one number per run, such as [{size - 1},-1]"
        )
    return found + [False] * (size - len(found))


def write_openpi(directory: Path, numbers: Numbers, horizon: int, delta_mask: list[int]) -> None:
    """Write ``norm_stats.json``: mean, std and two quantiles of ``state`` and ``actions``."""
    found = {
        "state": numbers.state_statistics(),
        "actions": numbers.action_statistics(horizon, _relative(numbers, delta_mask)),
    }
    kept = {
        key: {name: statistics[name] for name in ("mean", "std", "q01", "q99")}
        for key, statistics in found.items()
    }
    write_json(directory / FILES[OPENPI][0], {"norm_stats": kept})


def write_openvla(directory: Path, datasets: Sequence[Numbers], mask: list[int] | None) -> None:
    """Write ``dataset_statistics.json``, with an entry for each dataset, by its name."""
    document: dict[str, Any] = {}
    for numbers in datasets:
        if numbers.name in document:
            raise UserError(
                f"two datasets are called {numbers.name}, and {FILES[OPENVLA][0]} has one entry of a name: rename a directory"
            )
        parts = {"action": numbers.action_statistics()}
        if numbers.states.shape[1]:
            parts["proprio"] = numbers.state_statistics()
        entry: dict[str, Any] = {
            key: {name: part[name] for name in ("mean", "std", "max", "min", "q01", "q99")}
            for key, part in parts.items()
        }
        size = numbers.actions.shape[1]
        entry["action"]["mask"] = [True] * size if mask is None else flags(mask, size, "mask")
        entry |= {"num_transitions": sum(numbers.lengths), "num_trajectories": len(numbers.lengths)}
        document[numbers.name] = entry
    write_json(directory / FILES[OPENVLA][0], document)


def write_lerobot(directory: Path, numbers: Numbers, horizon: int, delta_mask: list[int]) -> None:
    """Write ``stats.json``, and the same as the tensors of a processor's normalisation step."""
    found = {
        form.STATE: numbers.state_statistics(),
        form.ACTION: numbers.action_statistics(horizon, _relative(numbers, delta_mask)),
    }
    document, tensors = (directory / name for name in FILES[LEROBOT])
    with replacing(tensors) as aside:
        save_file(
            {
                f"{key}.{name}": torch.tensor(values, dtype=torch.float32)
                for key, statistics in found.items()
                for name, values in statistics.items()
            },
            aside,
        )
    write_json(document, found)


def _relative(numbers: Numbers, delta_mask: list[int]) -> list[int]:
    """Return the action dimensions relative to the state. Raises UserError."""
    size, states = numbers.actions.shape[1], numbers.states.shape[1]
    found = [i for i, flag in enumerate(flags(delta_mask, size, "delta_mask")) if flag]
    if found and found[-1] >= states:
        raise UserError(
            f"delta_mask={delta_mask} makes action {found[-1]} relative to the state, which has {states} numbers: "
            "choose dimensions that both have"
        )
    return found

"""Replay buffer in memory-mapped files: append episodes, sample uniformly, drop the oldest records.

A record is one observation and the action taken there. Episodes are contiguous, so the next
observation of a record is the next record, and every image is stored once. Written records never
change, so a checkpoint stores only their number: what was written after it, or incompletely when
the process died, is overwritten.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.types import ACTED, Tensors, Transitions

SEGMENT = 1024
"""Records per file."""
LAYOUT = "layout.json"


class Replay:
    """A replay buffer on disk, as described at the top of this module."""

    def __init__(self, directory: Path, capacity: int, total: int = 0) -> None:
        """Open a replay in ``directory`` that keeps the newest ``capacity`` records.

        ``total``: the number of records at the checkpoint to resume; 0 deletes ``directory`` and
        starts empty. Raises UserError if the files hold fewer records.
        """
        self.directory, self.capacity, self.total = directory, capacity, total
        self._segments: dict[int, dict[str, NDArray[Any]]] = {}
        self._layout: dict[str, tuple[str, list[int]]] = {}
        if total == 0:
            shutil.rmtree(directory, ignore_errors=True)
        self._acted = np.zeros(0, dtype=bool)
        """``acted`` of the records from ``first`` on."""
        if total:
            self._layout = self._read_layout()
            self._acted = self._gather(np.arange(self.first, total), [ACTED])[ACTED].numpy()

    @property
    def first(self) -> int:
        """Number of the oldest stored record."""
        return max(0, self.total - self.capacity)

    def __len__(self) -> int:
        """Return the number of transitions to sample from."""
        return int(self._acted.sum())

    def append(self, episode: Mapping[str, Tensor]) -> None:
        """Append the records of an episode or of its beginning: fields ``[L, ...]``.

        One is ``acted``, bool ``[L]``. Raises OSError, with nothing appended, if the disk is full.
        """
        fields = {name: value.detach().cpu().numpy() for name, value in episode.items()}
        layout = {name: (value.dtype.str, list(value.shape[1:])) for name, value in fields.items()}
        if not self._layout:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / LAYOUT).write_text(json.dumps(layout))
            self._layout = layout
        if layout != self._layout:
            raise ValueError(f"the records have layout {layout}, earlier ones have {self._layout}")
        length, written = len(fields[ACTED]), 0
        while written < length:
            number, row = divmod(self.total + written, SEGMENT)
            count = min(SEGMENT - row, length - written)
            for name, array in self._segment(number, create=True).items():
                array[row : row + count] = fields[name][written : written + count]
            written += count
        before = self.first
        self.total += length
        self._acted = np.concatenate([self._acted, fields[ACTED]])[self.first - before :]

    def sample(self, batch: int, generator: torch.Generator) -> Transitions:
        """Sample ``batch`` transitions uniformly with replacement."""
        candidates = self.first + np.flatnonzero(self._acted)
        index = candidates[torch.randint(len(candidates), (batch,), generator=generator).numpy()]
        after = np.minimum(index + 1, self.total - 1)  # after a terminated episode: a record of another one, which is not used
        return Transitions(self._gather(index), self._gather(after))

    def flush(self) -> None:
        """Write appended records to disk, so that they survive a power failure."""
        for segment in self._segments.values():
            for array in segment.values():
                assert isinstance(array.base, np.memmap)
                array.base.flush()

    def forget(self, total: int) -> None:
        """Delete files not needed to resume a checkpoint with ``total`` records or a later one."""
        last = max(0, total - self.capacity) // SEGMENT
        for path in self.directory.glob("segment_*"):
            number = int(path.name.removeprefix("segment_"))
            if number < last:
                self._segments.pop(number, None)
                shutil.rmtree(path)

    def _gather(self, index: NDArray[np.int64], names: list[str] | None = None) -> Tensors:
        numbers, rows = (each.tolist() for each in np.divmod(index, SEGMENT))
        segments = [self._segment(number) for number in numbers]
        found = {}
        for name in names or list(self._layout):
            dtype, shape = self._layout[name]
            values = np.empty((len(index), *shape), dtype)
            # one by one: in a large replay, most segments hold one or two records of a batch
            for place, (segment, row) in enumerate(zip(segments, rows, strict=True)):
                values[place] = segment[name][row]
            found[name] = torch.from_numpy(values)
        return found

    def _segment(self, number: int, create: bool = False) -> dict[str, NDArray[Any]]:
        if number not in self._segments:
            directory = self.directory / f"segment_{number:06d}"
            if create:
                directory.mkdir(exist_ok=True)
            self._segments[number] = {name: self._map(directory / name, *layout, create) for name, layout in self._layout.items()}
        return self._segments[number]

    def _map(self, path: Path, dtype: str, shape: list[int], create: bool) -> NDArray[Any]:
        whole = (SEGMENT, *shape)
        size = int(np.prod(whole)) * np.dtype(dtype).itemsize
        if create and (not path.exists() or path.stat().st_size != size):
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, but a crash in a mapped page
        if not path.exists() or path.stat().st_size != size:
            raise UserError(f"{path} is missing or truncated: resume another checkpoint, or start again with resume=never")
        return np.memmap(path, dtype, "r+", shape=whole).view(np.ndarray)  # indexing a memmap creates another memmap, which is slow

    def _read_layout(self) -> dict[str, tuple[str, list[int]]]:
        try:
            stored = json.loads((self.directory / LAYOUT).read_text())
            return {name: (dtype, shape) for name, (dtype, shape) in stored.items()}
        except (OSError, ValueError) as error:
            raise UserError(f"{self.directory / LAYOUT} cannot be read ({error}): start again with resume=never") from None


def sample_mixed(stores: list[Replay], shares: list[float], batch: int, generator: torch.Generator) -> Transitions:
    """Sample ``batch`` transitions, a fixed share from each store; the first store gets the rest.

    RLPD, Ball et al. 2023, takes half of each batch from demonstrations.
    """
    counts = [round(share * batch) for share in shares[1:]]
    counts = [batch - sum(counts), *counts]
    return Transitions.cat([store.sample(count, generator) for store, count in zip(stores, counts, strict=True) if count])

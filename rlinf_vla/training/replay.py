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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.io import read_json
from rlinf_vla.core.transitions import ACTED, RankRows, Transitions
from rlinf_vla.core.types import Tensors

SEGMENT = 1024
"""Records per file."""
LAYOUT = "layout.json"
_EPISODE, _STORED = "episode", "stored"
"""Fields of an index: number of the episode; number of records that this rank has until then."""


class Records:
    """Records in files, numbered in the order in which they were appended."""

    def __init__(self, directory: Path, total: int = 0) -> None:
        """Open the records in ``directory``.

        ``total``: the number of records at the checkpoint to resume; 0 deletes ``directory`` and
        starts empty. Raises UserError if the files hold fewer records.
        """
        self.directory = directory
        self.total = total
        self._segments: dict[int, dict[str, NDArray[Any]]] = {}
        self._layout: dict[str, tuple[str, list[int]]] = {}
        if total:
            self._layout = self._read_layout()
        else:
            shutil.rmtree(directory, ignore_errors=True)

    def append(self, episode: Mapping[str, Tensor]) -> None:
        """Append the records of an episode or of its beginning: fields ``[L, ...]``.

        Raises OSError, with nothing appended, if the disk is full.
        """
        fields = {name: value.detach().cpu().numpy() for name, value in episode.items()}
        layout = {name: (value.dtype.str, list(value.shape[1:])) for name, value in fields.items()}
        if not self._layout:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / LAYOUT).write_text(json.dumps(layout))
            self._layout = layout
        if layout != self._layout:
            raise ValueError(f"the records have layout {layout}, earlier ones have {self._layout}")
        length = len(next(iter(fields.values())))
        written = 0
        while written < length:
            number, row = divmod(self.total + written, SEGMENT)
            count = min(SEGMENT - row, length - written)
            for name, array in self._segment(number, create=True).items():
                array[row : row + count] = fields[name][written : written + count]
            written += count
        self.total += length

    def newest(self) -> Tensors:
        """Return the newest record: fields ``[1, ...]``."""
        return self.gather(np.array([self.total - 1]))

    def transitions(self, index: NDArray[np.int64], of_rank: RankRows | None = None) -> Transitions:
        """Return the records ``index`` and the following ones."""
        after = np.minimum(
            index + 1, self.total - 1
        )  # after a terminated episode: a record of another one, which is not used
        return Transitions(self.gather(index), self.gather(after), of_rank)

    def flush(self) -> None:
        """Write appended records to disk, so that they survive a power failure."""
        for segment in self._segments.values():
            for array in segment.values():
                assert isinstance(array.base, np.memmap)
                array.base.flush()

    def delete_before(self, record: int) -> None:
        """Delete the files of which all records are older than ``record``."""
        for path in self.directory.glob("segment_*"):
            number = int(path.name.removeprefix("segment_"))
            if number < record // SEGMENT:
                self._segments.pop(number, None)
                shutil.rmtree(path)

    def gather(self, index: NDArray[np.int64], names: list[str] | None = None) -> Tensors:
        numbers, rows = (array.tolist() for array in np.divmod(index, SEGMENT))
        segments = [self._segment(number) for number in numbers]
        tensors = {}
        for name in names or list(self._layout):
            dtype, shape = self._layout[name]
            values = np.empty((len(index), *shape), dtype)
            # one by one: in a large replay, most segments hold one or two records of a batch
            for position, (segment, row) in enumerate(zip(segments, rows, strict=True)):
                values[position] = segment[name][row]
            tensors[name] = torch.from_numpy(values)
        return tensors

    def _segment(self, number: int, create: bool = False) -> dict[str, NDArray[Any]]:
        if number not in self._segments:
            directory = self.directory / f"segment_{number:06d}"
            if create:
                directory.mkdir(exist_ok=True)
            self._segments[number] = {
                name: self._map(directory / name, *layout, create)
                for name, layout in self._layout.items()
            }
        return self._segments[number]

    def _map(self, path: Path, dtype: str, shape: list[int], create: bool) -> NDArray[Any]:
        whole = (SEGMENT, *shape)
        size = int(np.prod(whole)) * np.dtype(dtype).itemsize
        if create and (not path.exists() or path.stat().st_size != size):
            with path.open("wb") as file:
                os.posix_fallocate(
                    file.fileno(), 0, size
                )  # a full disk is an error here, but a crash in a mapped page
        if not path.exists() or path.stat().st_size != size:
            raise UserError(
                f"{path} is missing or truncated: resume another checkpoint, or start again with resume=never"
            )
        return np.memmap(path, dtype, "r+", shape=whole).view(
            np.ndarray
        )  # indexing a memmap creates another memmap, which is slow

    def _read_layout(self) -> dict[str, tuple[str, list[int]]]:
        try:
            stored = read_json(self.directory / LAYOUT)
            return {name: (dtype, shape) for name, (dtype, shape) in stored.items()}
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.directory / LAYOUT} cannot be read ({error}): start again with resume=never"
            ) from None


class Replay(Records):
    """A replay buffer on disk, as described at the top of this module."""

    stores_next = True
    """Whether the records of the next episode are stored in this process."""
    on_all_ranks = True
    """Whether every trainer rank has stored an episode."""

    def __init__(self, directory: Path, capacity: int, total: int = 0) -> None:
        """Open a replay in ``directory`` that keeps the newest ``capacity`` records.

        ``total``: see ``Records``. Raises UserError if the files hold fewer records.
        """
        super().__init__(directory, total)
        self.capacity = capacity
        self._acted = (
            self.gather(np.arange(self.first, total), [ACTED])[ACTED].numpy()
            if total
            else np.zeros(0, dtype=bool)
        )
        """``acted`` of the records from ``first`` on."""

    @property
    def held(self) -> int:
        """Number of records that this process has ever stored."""
        return self.total

    @property
    def first(self) -> int:
        """Number of the oldest record to sample from."""
        return max(0, self.total - self.capacity)

    def __len__(self) -> int:
        """Return the number of transitions to sample from."""
        return int(self._acted.sum())

    def append(self, episode: Mapping[str, Tensor]) -> None:
        """See ``Records``. One of the fields is ``acted``, bool ``[L]``."""
        before = self.first
        super().append(episode)
        self._acted = np.concatenate([self._acted, episode[ACTED].cpu().numpy()])[
            self.first - before :
        ]

    def draw(self, batch: int, generator: torch.Generator) -> NDArray[np.int64]:
        """Return the numbers of ``batch`` records, drawn uniformly with replacement."""
        candidates = self.first + np.flatnonzero(self._acted)
        return candidates[torch.randint(len(candidates), (batch,), generator=generator).numpy()]

    def sample(self, batch: int, generator: torch.Generator) -> Transitions:
        """Sample ``batch`` transitions uniformly with replacement."""
        return self.transitions(self.draw(batch, generator))

    def forget(self, total: int) -> None:
        """Delete files not needed to resume a checkpoint with ``total`` records or a later one."""
        self.delete_before(max(0, total - self.capacity))


class ShardedReplay:
    """A replay buffer whose episodes are divided among the trainer ranks: rank ``r`` of ``W``
    stores episodes ``r``, ``r + W``, ...

    Every rank has an index of all records. So all draw the same batches, which are those of a
    ``Replay``, and each reads its own rows of them.
    """

    def __init__(
        self, directory: Path, rank: int, ranks: int, capacity: int, total: int = 0
    ) -> None:
        """Open the part of rank ``rank`` of ``ranks`` in ``directory``, which they share.

        ``capacity``, ``total``: of the whole replay, see ``Replay``. Raises UserError if the files
        hold fewer records.
        """
        self._rank = rank
        self._ranks = ranks
        directory = directory / f"rank_{rank}"
        self._index = Replay(directory / "index", capacity, total)
        newest = (
            {name: int(value) for name, value in self._index.newest().items()}
            if total
            else {_EPISODE: -1, _STORED: 0}
        )
        self._episodes = newest[_EPISODE] + 1
        self._records = Records(directory / "records", newest[_STORED])

    @property
    def total(self) -> int:
        return self._index.total

    @property
    def stores_next(self) -> bool:
        """Whether the records of the next episode are stored by this rank."""
        return self._episodes % self._ranks == self._rank

    @property
    def held(self) -> int:
        """See ``Replay``."""
        return self._records.total

    @property
    def on_all_ranks(self) -> bool:
        """See ``Replay``."""
        return self._episodes >= self._ranks

    def __len__(self) -> int:
        """Return the number of transitions of all ranks to sample from."""
        return len(self._index)

    def append(self, episode: Mapping[str, Tensor]) -> None:
        """Append an episode, see ``Replay``; all ranks must call it. A rank that does not store it
        needs only ``acted``."""
        acted = episode[ACTED]
        before = self._records.total
        stored = torch.full((len(acted),), before)
        if self.stores_next:
            self._records.append(episode)
            stored = before + 1 + torch.arange(len(acted))
        self._index.append(
            {ACTED: acted, _EPISODE: torch.full((len(acted),), self._episodes), _STORED: stored}
        )
        self._episodes += 1

    def newest(self) -> Tensors:
        """Return the newest record of this rank: fields ``[1, ...]``."""
        return self._records.newest()

    def sample(self, batch: int, generator: torch.Generator) -> Transitions:
        """Return this rank's rows of ``batch`` transitions, sampled uniformly with replacement."""
        drawn = self._index.gather(self._index.draw(batch, generator), [_EPISODE, _STORED])
        rows = (drawn[_EPISODE] % self._ranks == self._rank).nonzero()[:, 0]
        return self._records.transitions(drawn[_STORED][rows].numpy() - 1, RankRows(rows, batch))

    def flush(self) -> None:
        """See ``Replay``."""
        self._index.flush()
        self._records.flush()

    def forget(self, total: int) -> None:
        """See ``Replay``. A record stays, however old, because ``newest`` needs one."""
        if total:
            oldest = self._index.gather(np.array([max(0, total - self._index.capacity)]), [_STORED])
            self._records.delete_before(max(0, int(oldest[_STORED]) - 1))
        self._index.forget(total)


AnyReplay = Replay | ShardedReplay


def sample_mixed(
    stores: Sequence[AnyReplay], shares: Sequence[float], batch: int, generator: torch.Generator
) -> Transitions:
    """Sample ``batch`` transitions, a fixed share from each store; the first store gets the rest.

    RLPD, Ball et al. 2023, takes half of each batch from demonstrations. A trainer rank without any
    of the rows gets the newest one that it has, which does not count.
    """
    counts = [round(share * batch) for share in shares[1:]]
    counts = [batch - sum(counts), *counts]
    transitions = Transitions.cat(
        [
            store.sample(count, generator)
            for store, count in zip(stores, counts, strict=True)
            if count
        ]
    )
    if transitions.of_rank is None or len(transitions.of_rank.rows):
        return transitions
    record = next(store for store in stores if store.held).newest()
    return Transitions(
        record, record, RankRows(torch.zeros(1, dtype=torch.int64), batch, counts=False)
    )

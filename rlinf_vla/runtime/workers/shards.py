"""Shards of rollouts: how they are packed for other processes, and those that are being produced.

Tensors are packed as numpy arrays, which processes of one machine read without a copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlinf_vla.core.types import Episodes, Tensors, Trajectory, flattened
from rlinf_vla.rollout.reward_shaping import SEEN

warnings.filterwarnings(
    "ignore", message="The given NumPy array is not writable"
)  # shared arrays are only read here


@dataclass(frozen=True)
class Packed:
    """Tensors as numpy arrays. ``bfloat16``: names of those that numpy can hold only as int16."""

    arrays: dict[str, np.ndarray]
    bfloat16: frozenset[str] = frozenset()

    @staticmethod
    def of(tensors: Tensors) -> Packed:
        half = frozenset(name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16)
        host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        return Packed(
            {
                name: (tensor.view(torch.int16) if name in half else tensor).numpy()
                for name, tensor in host.items()
            },
            half,
        )

    def tensors(self) -> Tensors:
        """Return tensors that share the arrays' memory and must not be written to."""
        tensors = {name: torch.from_numpy(array) for name, array in self.arrays.items()}
        return {
            name: tensor.view(torch.bfloat16) if name in self.bfloat16 else tensor
            for name, tensor in tensors.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


_INPUT, _LATENT = "inputs.", "latent."
ROW = "row"
"""The only input of a light trajectory: serial number << 32 plus row of its heavy part."""


def heavy_parts(rollouts: Trajectory) -> tuple[Packed, Packed]:
    """Return what only a policy reads (inputs, latents) and what only a reward reads.

    Both have one row per policy call.
    """
    flat = flattened(rollouts)
    named = {
        f"{_INPUT}{name}": value for name, value in flat.inputs.items() if not name.startswith(SEEN)
    }
    reward_inputs = {name: value for name, value in flat.inputs.items() if name.startswith(SEEN)}
    return Packed.of(
        named | {f"{_LATENT}{name}": value for name, value in flat.latent.items()}
    ), Packed.of(reward_inputs)


def light_part(rollouts: Trajectory) -> Packed:
    """Return all fields but inputs and latents."""
    named = {
        field.name: getattr(rollouts, field.name)
        for field in fields(Trajectory)
        if field.name not in ("inputs", "latent")
    }
    return Packed.of({name: value for name, value in named.items() if value is not None})


def light_trajectory(packed: Packed, serial: int) -> Trajectory:
    """Unpack a light part. ``serial``: serial number of its heavy part."""
    tensors = packed.tensors()
    shape = tensors["value"].shape
    row = (serial << 32) + torch.arange(tensors["value"].numel()).reshape(shape)
    return Trajectory(inputs={ROW: row}, latent={}, **tensors)


def serial_of(shard: Trajectory) -> int:
    return int(shard.inputs[ROW].flatten()[0]) >> 32


class StoredRows:
    """Rows of shards in the object store, read as one tensor is: an index copies its rows."""

    def __init__(self, shards: Mapping[int, Tensor], rows: Tensor) -> None:
        """``shards``: by serial number. ``rows``: int64 ``[N]``, as in ``ROW``."""
        self._shards = shards
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Tensor:
        serial = self._rows[index] >> 32
        row = self._rows[index] & 0xFFFFFFFF
        like = next(iter(self._shards.values()))
        values = like.new_empty(len(row), *like.shape[1:])
        for number in serial.unique().tolist():
            places = (serial == number).nonzero()[:, 0]
            values[places] = self._shards[number][row[places]]
        return values


class HeavyParts:
    """The heavy parts that a trainer has received, by serial number."""

    def __init__(self) -> None:
        self._parts: dict[int, Tensors] = {}

    def add(self, serial: int, packed: Packed) -> None:
        self._parts[serial] = packed.tensors()

    def forget(self, serials: Sequence[int]) -> None:
        for serial in serials:
            self._parts.pop(serial, None)

    def complete(self, calls: Trajectory) -> Trajectory:
        """Return ``calls`` ``[N]`` with their inputs and latents as ``StoredRows``, ``N`` > 0."""
        rows = calls.inputs[ROW]
        serials = (rows >> 32).unique().tolist()
        names = self._parts[serials[0]]
        columns: dict[str, Any] = {
            name: StoredRows({number: self._parts[number][name] for number in serials}, rows)
            for name in names
        }
        inputs = {
            name.removeprefix(_INPUT): value
            for name, value in columns.items()
            if name.startswith(_INPUT)
        }
        latent = {
            name.removeprefix(_LATENT): value
            for name, value in columns.items()
            if name.startswith(_LATENT)
        }
        return replace(calls, inputs=inputs, latent=latent)


def whole(calls: Trajectory, heavy: Packed) -> Trajectory:
    """Join a light shard with its heavy part; ``[N]`` calls."""
    parts = HeavyParts()
    parts.add(0, heavy)
    flat = flattened(calls)
    return parts.complete(replace(flat, inputs={ROW: torch.arange(len(flat))}))


# --- pending

_LOOK = 0.1
"""Seconds between checks whether the run is to end."""

Parts = TypeVar("Parts", range, Episodes)


@dataclass(frozen=True)
class Task:
    """A shard to roll out: rollout worker's method, iteration, policy version and arguments."""

    method: str
    iteration: int
    version: int
    arguments: tuple[Any, ...]


class Shards:
    """Pending shards in a fixed order; iterating waits for each (for all without ``streaming``)."""

    def __init__(
        self,
        items: Sequence[tuple[Task, Future[Trajectory]]],
        streaming: bool,
        look: Callable[[float], None],
    ) -> None:
        self.items = items
        self._streaming = streaming
        self._look = look

    def __iter__(self) -> Iterator[Trajectory]:
        if not self._streaming:
            for _, future in self.items:
                self._result(future)
        for _, future in self.items:
            yield self._result(future)

    def _result(self, future: Future[Trajectory]) -> Trajectory:
        while True:
            self._look(sum(item.done() for _, item in self.items) / len(self.items))
            try:
                return future.result(timeout=_LOOK)
            except NotYet:
                if future.done():  # a TimeoutError of the work itself
                    raise


def parts(items: Parts, size: int) -> list[Parts]:
    """Return ``items`` in parts of at most ``size``."""
    return [items[first : first + size] for first in range(0, len(items), size)]

"""Trainer ranks: split minibatches, sum gradients and statistics, access pieces of sharded tensors.

Every rank can read the whole batch and draws the same minibatches; of each it computes rows
``rank, rank + W, rank + 2 W, ...``, which it copies one micro-batch at a time. So minibatches, the
order of steps and all divisors are those of a single process, which is rank 0 of ``W = 1`` and
communicates nothing. With ``cluster.trainer_split=measured`` a rank's rows are instead a share of
each minibatch (see ``Division``); divisors are still counted on the whole minibatch.

An unsharded tensor is its own piece. DTensor is imported on first use, because the import takes a
second. Its arithmetic is not used: every operation on a DTensor has overhead, and the optimiser is
elementwise anyway.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.devices import CPU, synchronise
from rlinf_vla.core.types import Tensors

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by bytes per number. Sums of integers do not depend on the order, unlike floats."""

BUCKET = 64 << 20
"""Bytes of gradients packed for one collective: enough for a link's bandwidth, little memory."""

LEAST = 4
"""Minimum number of rows per pass: with fewer, some CPUs multiply matrices in another order, and
the size of the last micro-batch depends on the number of ranks."""


LEAST_UPDATES = 3
"""Updates that are measured before the first change: the first one is slower, by allocations."""
WINDOW = 5
"""Newest updates whose median counts."""
TOLERANCE = 0.05
"""Largest relative change of a share that is taken for noise."""
SLOWEST = 0.05
"""No rank counts as slower than this part of the fastest: a rank without rows is not measured."""


class Sliceable(Protocol):
    """A batch of ``len(batch)`` rows; slices are such batches, with a method ``to(device)``."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any) -> Any: ...


class Learnable(Sliceable, Protocol):
    """A batch of rows; ``counts``, bool ``[N]``, marks the rows that have a loss."""

    @property
    def counts(self) -> Tensor: ...


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@dataclass
class Division:
    """How the ranks divide rows, and how fast this rank computes its own."""

    shares: Sequence[float] = ()
    """Share of each rank, which sum to 1; all ranks have the same. Empty: all are equal."""
    rows: int = 0
    """Rows that this rank has computed; a row counts once per pass."""
    seconds: float = 0.0
    """Seconds in which it computed them, without those in which it waited for other ranks."""

    def rows_of(self, rank: int, count: int) -> range:
        """Return the positions of the rows of ``rank`` among ``count`` rows."""
        if not self.shares:
            return range(rank, count, world_size())
        first, end = (round(count * sum(self.shares[:ranks])) for ranks in (rank, rank + 1))
        return range(first, end)

    def passes(self, count: int, size: int) -> int:
        """Return the number of this rank's passes of at most ``size`` rows, at least one.

        With equal shares, all ranks make the same number, because each pass of a sharded policy
        has collectives. With others, only the sums after the last pass are collective.
        """
        most = len(self.rows_of(rank() if self.shares else 0, count))
        return max(1, math.ceil(most / size))

    @property
    def speed(self) -> float:
        """This rank's rows per second; 0 if it computed none."""
        return self.rows / self.seconds if self.rows else 0.0

    @contextmanager
    def measured(self, device: torch.device, rows: int = 0) -> Iterator[None]:
        """Measure work on ``rows`` of this rank in the context, which waits for no other rank.

        A single process divides nothing, so it does not wait for its device either.
        """
        began = time.perf_counter()
        yield
        if world_size() > 1:
            synchronise(device)
        self.seconds += time.perf_counter() - began
        self.rows += rows


class TrainerSplit:
    """The driver's decision on the shares of the trainer ranks in the rows of the next update.

    Ranks whose speeds differ by less than ``TOLERANCE`` keep the even split, exactly. Only the
    driver decides, and it sends the shares with each update, so all ranks have the same. Shares
    change the rounding of gradients; they are part of a checkpoint, so that a resumed run goes on
    with those of the interrupted one.
    """

    def __init__(self, ranks: int, measures: bool) -> None:
        """``measures``: false keeps the even split, as one rank does."""
        self._ranks = ranks
        self._measures = measures and ranks > 1
        self._speeds: list[list[float]] = []
        """Of the newest updates: each rank's part of the summed speed, which does not depend on
        what was computed."""
        self.shares: list[float] = []
        """They sum to 1, to rounding. Empty: the split is even."""

    def observe(self, speeds: Sequence[float]) -> None:
        """Receive each rank's rows per second in an update; one is 0 if it had no row."""
        if not self._measures or not all(speeds):
            return
        self._speeds = [*self._speeds, _parts(speeds)][-WINDOW:]
        if len(self._speeds) < LEAST_UPDATES:
            return
        typical = [median(of_rank) for of_rank in zip(*self._speeds, strict=True)]
        wanted = _parts([max(speed, SLOWEST * max(typical)) for speed in typical])
        even = [1 / self._ranks] * self._ranks
        if not _near(wanted, self.shares or even):
            self.shares = [] if _near(wanted, even) else wanted

    def save(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON; empty with an even split."""
        if not self._measures:
            return {}
        return {"trainer_split": {"shares": self.shares, "speeds": self._speeds}}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what ``save`` returned, unless it is of another number of ranks."""
        saved = state.get("trainer_split", {"shares": [], "speeds": []})
        if self._measures and all(len(speeds) == self._ranks for speeds in saved["speeds"]):
            self.shares = saved["shares"]
            self._speeds = saved["speeds"]


def _parts(values: Sequence[float]) -> list[float]:
    return [value / sum(values) for value in values]


def _near(wanted: Sequence[float], present: Sequence[float]) -> bool:
    return all(abs(new - old) <= TOLERANCE * old for new, old in zip(wanted, present, strict=True))


class Rows:
    """Rows ``index`` (int64 ``[n]``) of a batch, copied on access: a rank needs only its own."""

    def __init__(self, batch: Any, index: Tensor) -> None:
        self.batch = batch
        self.index = index

    @property
    def counts(self) -> Tensor:
        return self.batch.counts[self.index]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: Any) -> Any:
        return self.batch[self.index[index]]


def minibatches(count: int, epochs: int, size: int, seed: int, groups: int = 1) -> list[Tensor]:
    """Return the row numbers (int64) of each minibatch; every epoch is shuffled anew.

    Position ``i`` of an epoch has a row whose number is ``i`` modulo ``groups``. So a rank that
    takes every W-th row, with ``groups`` a multiple of W, gets the same rows in each epoch.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = list[Tensor]()
    for _ in range(epochs):
        order = torch.empty(count, dtype=torch.int64)
        for group in range(min(groups, count)):
            rows = torch.arange(group, count, groups)
            order[group::groups] = rows[torch.randperm(len(rows), generator=generator)]
        batches += order.split(size)
    return batches


def micro_batches(
    batch: Sliceable, size: int, device: torch.device = CPU, division: Division | None = None
) -> Iterator[tuple[Any, bool]]:
    """Yield this rank's micro-batches of at most ``size`` rows, on ``device``, and if each counts.

    A rank with fewer micro-batches than ``division`` requires (by default an even one) gets a row
    that does not count, because collectives need all ranks.
    """
    division = division or Division()
    mine = division.rows_of(rank(), len(batch))
    for start in range(0, len(mine), size):
        part = mine[start : start + size]
        yield batch[part.start : part.stop : part.step].to(device), True
    for _ in range(division.passes(len(batch), size) - math.ceil(len(mine) / size)):
        yield batch[:1].to(device), False


def rows_of_rank(
    minibatches: Sequence[Tensor], size: int, division: Division | None = None
) -> Tensor:
    """Return the rows (int64, ascending) of ``minibatches`` that this rank computes."""
    return torch.cat(
        [part for rows in minibatches for part, _ in micro_batches(rows, size, division=division)]
    ).unique()


def map_rows(
    function: Callable[[Any], Tensor],
    batch: Sliceable,
    size: int,
    device: torch.device = CPU,
    least: int = LEAST,
    division: Division | None = None,
) -> Tensor:
    """Apply a row-wise ``function`` to all rows ``[N, ...]``, ``size`` at a time, on ``device``.
    The ranks share the work, by default evenly, and each gets the whole result, on the CPU. Passes
    of fewer than ``least`` rows are filled up."""
    division = division or Division()
    parts = [division.rows_of(each, len(batch)) for each in range(world_size())]
    with division.measured(device, len(parts[rank()])):
        outputs = [
            function(_tall(part, least))[: len(part) if counted else 0]
            for part, counted in micro_batches(batch, size, device, division)
        ]
    own = torch.cat(outputs)
    if world_size() == 1:
        return own.cpu()
    padded = own.new_zeros(max(map(len, parts)), *own.shape[1:])
    padded[: len(own)] = own
    every = [torch.empty_like(padded) for _ in range(world_size())]
    dist.all_gather(every, padded)
    whole = own.new_empty(len(batch), *own.shape[1:])
    for part, rows in zip(parts, every, strict=True):
        whole[part.start : part.stop : part.step] = rows[: len(part)]
    return whole.cpu()


def _tall(part: Any, least: int) -> Any:
    """Repeat the last row, up to ``least`` rows."""
    return part if len(part) >= least else part[torch.arange(least).clamp(max=len(part) - 1)]


def summed(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Sum each value over all ranks; the result is the same on all of them."""
    if world_size() == 1 or not values:
        return {name: float(value) for name, value in values.items()}
    return dict(
        zip(
            values,
            total(torch.stack([value.double() for value in values.values()])).tolist(),
            strict=True,
        )
    )


def total(part: Tensor) -> Tensor:
    """Sum a tensor over all ranks; the result is the same on all of them."""
    whole = part.detach().clone()
    if world_size() > 1:
        dist.all_reduce(whole)
    return whole


def require_alike(weights: Mapping[str, Tensor]) -> None:
    """Raise UserError on all ranks if their weights differ, which no later check would detect.
    All ranks must call it."""
    if world_size() == 1:
        return
    sums = torch.stack(
        [
            weight.detach().contiguous().view(_BITS[weight.element_size()]).sum()
            for weight in weights.values()
        ]
    )
    ends = torch.stack([sums, -sums])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    differ = [name for name, high, low in zip(weights, *ends.tolist(), strict=True) if high != -low]
    if differ:
        raise UserError(
            f"trainer ranks begin with different weights ({differ[0]}): give all the same recipe, seed and checkpoint"
        )


def sum_gradients(parameters: Iterable[Tensor], bucket: int = BUCKET) -> None:
    """Sum gradients over all ranks, in place: each rank gets those of the whole minibatch.

    Small gradients are packed into buckets of at most ``bucket`` bytes, one collective each. A
    gradient that has a bucket to itself is summed where it is, without a copy.
    """
    if world_size() == 1:
        return
    # a gradient is None on all ranks or on none, since they make the same passes
    for gradients in buckets(
        (parameter.grad for parameter in parameters if parameter.grad is not None), bucket
    ):
        if len(gradients) == 1 and gradients[0].is_contiguous():
            dist.all_reduce(gradients[0])
            continue
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, total in zip(
            gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
        ):
            gradient.copy_(total.view_as(gradient))


def buckets(tensors: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Yield the tensors, in order, in groups of one dtype and at most ``size`` bytes, or of one."""
    filling: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        group = filling.setdefault(tensor.dtype, [])
        if group and sum(member.nbytes for member in group) + tensor.nbytes > size:
            yield group
            filling[tensor.dtype] = group = []
        group.append(tensor)
    yield from filling.values()


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def local_shard(parameter: nn.Parameter) -> nn.Parameter:
    """Return this rank's piece of ``parameter``, in the same memory."""
    if not is_sharded(parameter):
        return parameter
    sharded: Any = parameter.detach()
    return nn.Parameter(sharded.to_local())


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    gradient: Any = parameter.grad
    return gradient.to_local() if gradient is not None and is_sharded(gradient) else gradient


def local_copy(like: Tensor, value: Tensor) -> Tensor:
    """Copy this rank's piece of ``value``, sharded as ``like``, to the device of ``like``.
    Every rank passes the whole ``value``."""
    if is_sharded(like):
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = like
        value = distribute_tensor(
            value.to(like.device), sharded.device_mesh, sharded.placements, src_data_rank=None
        ).to_local()
    return value.to(like.device, copy=True)


def copy_whole(target: Tensor, value: Tensor) -> None:
    """Copy the whole ``value`` into ``target``, or into this rank's piece of it."""
    sharded: Any = target
    if is_sharded(target):
        sharded.to_local().copy_(local_copy(target, value))
    else:
        target.copy_(value)


def shard_like(whole: Tensor, piece: Tensor) -> Tensor:
    """Return a tensor sharded as ``whole`` of which ``piece`` is this rank's part."""
    if not is_sharded(whole):
        return piece
    from torch.distributed.tensor import DTensor

    like: Any = whole
    return DTensor.from_local(
        piece,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


@dataclass(frozen=True)
class Spread:
    """Named tensors that may be sharded over the ranks.

    ``wholes``: for a tensor that is this rank's piece, a tensor sharded in the same way. All ranks
    have the same names.
    """

    tensors: Mapping[str, Tensor]
    wholes: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def is_sharded(self) -> bool:
        return any(map(is_sharded, (*self.tensors.values(), *self.wholes.values())))

    def described(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Return dtype and whole shape of each tensor, those with the longest numbers first."""
        described = {
            name: (tensor.dtype, self.wholes.get(name, tensor).shape)
            for name, tensor in self.tensors.items()
        }
        return dict(sorted(described.items(), key=lambda item: (-item[1][0].itemsize, item[0])))

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, whole, one after the other, in the order of ``described``.

        If any is sharded, rank 0 gets them on the CPU and others get empty tensors, and all ranks
        must take all. Pieces that were moved off the ranks' device are moved back one at a time.
        """
        gathers = self.is_sharded
        for name in self.described():
            yield name, self._gathered(name) if gathers else self.tensors[name]

    def _gathered(self, name: str) -> Tensor:
        whole = self.tensors[name]
        sharded: Any = shard_like(self.wholes[name], whole) if name in self.wholes else whole
        if is_sharded(sharded):
            whole = sharded.to(sharded.device_mesh.device_type).full_tensor()
        return whole.cpu() if rank() == 0 else torch.empty(0)


def gather_full(spread: Spread) -> Tensors:
    """Return the tensors unchanged if none is sharded; else gather them on rank 0.

    Then rank 0 gets whole tensors on the CPU, other ranks an empty dict, and all ranks must call
    it.
    """
    if not spread.is_sharded:
        return dict(spread.tensors)
    wholes = dict(spread.parts())
    return {name: wholes[name] for name in spread.tensors} if rank() == 0 else {}


def clip_shards(pieces: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Clip gradients by the norm over the pieces of all ranks; return this norm."""
    pieces = list(pieces)
    own = nn.utils.get_total_norm([piece.grad for piece in pieces if piece.grad is not None])
    square = own.double().square()
    dist.all_reduce(square)
    norm = square.sqrt().to(own.dtype)
    nn.utils.clip_grads_with_norm_(pieces, limit, norm)
    return norm

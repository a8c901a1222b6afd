"""Ranks that train together: which rows of a minibatch are whose, and what is summed over all.

Every rank is given the whole batch and draws the same minibatches; of each it computes rows ``rank, rank + W, rank + 2 W, ...``. So what a
minibatch holds, the order of steps and all that is divided by are one process's, which is rank 0 of ``W = 1`` and sends nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf_vla.types import UserError

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes per number: sums of integers are the same everywhere, to the last bit."""

LEAST = 4
"""Rows: with fewer, some CPUs multiply matrices in another order, and what is left over of a shard depends on how many there are."""


class Sliceable(Protocol):
    """``len(batch)`` rows, of which a slice is again such a batch."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any) -> Any: ...


class Learnable(Sliceable, Protocol):
    """A batch of rows, of which ``counts`` (bool ``[N]``) says which ones have a loss."""

    @property
    def counts(self) -> Tensor: ...


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Rows:
    """The rows of ``batch`` that ``index`` (int64 ``[n]``) names, copied when asked for: a rank needs its own only."""

    def __init__(self, batch: Learnable, index: Tensor) -> None:
        self.batch, self.index = batch, index.to(batch.counts.device)

    @property
    def counts(self) -> Tensor:
        return self.batch.counts[self.index]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: Any) -> Any:
        return self.batch[self.index[index]]


def shares(batch: Sliceable, size: int) -> list[tuple[Any, bool]]:
    """This rank's micro-batches of at most ``size`` rows, and whether they count.

    A rank that has one fewer than others is given a row that does not: collectives wait until all ranks have made the same passes.
    """
    mine = batch[rank() :: world_size()]
    parts = [(mine[start : start + size], True) for start in range(0, len(mine), size)]
    passes = math.ceil(math.ceil(len(batch) / world_size()) / size)
    return parts + [(batch[:1], False)] * (passes - len(parts))


def touched(minibatches: Sequence[Tensor], size: int) -> Tensor:
    """Which rows (int64, ascending) this rank computes in these minibatches (row numbers each), in micro-batches of ``size``."""
    return torch.cat([part for rows in minibatches for part, _ in shares(rows, size)]).unique()


def on_every_rank(function: Callable[[Any], Tensor], batch: Sliceable, size: int) -> Tensor:
    """``function`` of all rows ``[N, ...]``, ``size`` at a time, where it looks at each row for itself. Ranks share the work, and all are
    given the whole."""
    found = [function(_tall(part))[: len(part) if counted else 0] for part, counted in shares(batch, size)]
    own = torch.cat(found)
    if world_size() == 1:
        return own
    padded = own.new_zeros(math.ceil(len(batch) / world_size()), *own.shape[1:])
    padded[: len(own)] = own
    every = [torch.empty_like(padded) for _ in range(world_size())]
    dist.all_gather(every, padded)
    return torch.stack(every, dim=1).flatten(0, 1)[: len(batch)]


def _tall(part: Any) -> Any:
    """With its last row again, up to ``LEAST``."""
    return part if len(part) >= LEAST else part[torch.arange(LEAST).clamp(max=len(part) - 1)]


def summed(values: Mapping[str, Tensor]) -> dict[str, float]:
    """The sum of every rank's own numbers, the same on all ranks."""
    if world_size() == 1 or not values:
        return {name: float(value) for name, value in values.items()}
    total = torch.stack([value.detach().double() for value in values.values()])
    dist.all_reduce(total)
    return dict(zip(values, total.tolist(), strict=True))


def require_alike(weights: Mapping[str, Tensor]) -> None:
    """Raises UserError, on all ranks, where they begin with different weights: nothing later would tell. Every rank must ask."""
    if world_size() == 1:
        return
    sums = torch.stack([weight.detach().contiguous().view(_BITS[weight.element_size()]).sum() for weight in weights.values()])
    ends = torch.stack([sums, -sums])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    differ = [name for name, high, low in zip(weights, *ends.tolist(), strict=True) if high != -low]
    if differ:
        raise UserError(f"trainer ranks begin with different weights ({differ[0]}): give all the same recipe, seed and checkpoint")


def sum_gradients(parameters: Iterable[Tensor]) -> None:
    """Every rank's gradients become those of the whole minibatch, whose parts the ranks hold."""
    if world_size() == 1:
        return
    kinds: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:  # which is so on all ranks, since they make the same passes
            kinds[parameter.grad.dtype].append(parameter.grad)
    for gradients in kinds.values():
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))

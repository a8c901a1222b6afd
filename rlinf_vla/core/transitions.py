"""Records of a replay buffer, and a batch of them: all of it, or the rows of one trainer rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_vla.core.types import Tensors, mapped

ACTION = "action"
REWARD = "reward"
DISCOUNT = "discount"
ACTED = "acted"
COST = "cost"
RETURN = "return"
COST_RETURN = "cost_return"
OUTCOME = (ACTION, REWARD, DISCOUNT, ACTED, COST, RETURN, COST_RETURN)
"""Fields of a replay record beside the policy's inputs: see ``EpisodeRecords``.

``return`` and ``cost_return``: only of an algorithm whose ``stored`` adds them."""
LATENT = "latent."
"""Prefix of the names of a sample's latents in a record."""


@dataclass
class EpisodeRecords:
    """Replay records of one episode.

    ``records``: fields ``[L, ...]``: the policy's inputs, ``action`` as chosen, ``reward``,
    ``cost`` (discounted like the reward; 0 without safety limits) and ``discount`` of the chunk (0
    if the episode terminated there), and ``acted``: false in a last record that holds only the
    observation at a truncation. ``cost``: the episode's, not discounted; None: without limits.
    ``fault``: index in ``FAULTS`` of what cut the episode.
    """

    records: Tensors
    success: bool
    steps: int
    cost: float | None = None
    fault: int = 0


@dataclass(frozen=True)
class RankRows:
    """Which rows of a batch of ``size`` rows a trainer rank has: ``rows``, int64 ``[n]``.

    ``counts``: false if the rank has none. It then computes another record, which must not change
    the result, because collectives need all ranks.
    """

    rows: Tensor
    size: int
    counts: bool = True


@dataclass(frozen=True)
class Transitions:
    """Sampled transitions: fields ``[n, ...]`` of the records, and of the following records.

    Where an episode terminated, ``following`` is arbitrary; the discount there is 0. ``of_rank``:
    None if these are all rows of the batch. An algorithm that draws random numbers with ``own``,
    and takes every mean over the rows as a ``part``, learns the same on any number of ranks.
    """

    now: Tensors
    following: Tensors
    of_rank: RankRows | None = None

    def __len__(self) -> int:
        """Return the number of rows of the whole batch, on all ranks."""
        return len(next(iter(self.now.values()))) if self.of_rank is None else self.of_rank.size

    def own(self, values: Tensor) -> Tensor:
        """Return the rows of ``values``, ``[len(self), ...]``, that belong to these transitions."""
        return values if self.of_rank is None else values[self.of_rank.rows]

    def part(self, mean: Tensor) -> Tensor:
        """Return what ``mean``, a mean over these rows, contributes to that over the whole batch.

        The sum over all ranks is the mean over the whole batch.
        """
        if self.of_rank is None:
            return mean
        return mean * (len(self.of_rank.rows) / self.of_rank.size if self.of_rank.counts else 0.0)

    @staticmethod
    def cat(parts: Sequence[Transitions]) -> Transitions:
        """Join batches, either all whole or all of a rank; leave out those without rows here."""
        filled = [part for part in parts if part.of_rank is None or len(part.of_rank.rows)]
        now, following = (
            mapped(lambda *xs: torch.cat(xs), *fields) if fields else {}
            for fields in ([part.now for part in filled], [part.following for part in filled])
        )
        if all(part.of_rank is None for part in parts):
            return Transitions(now, following)
        rows = list[Tensor]()
        size = 0
        for part in parts:
            assert part.of_rank is not None
            rows.append(part.of_rank.rows + size)
            size += part.of_rank.size
        return Transitions(now, following, RankRows(torch.cat(rows), size))

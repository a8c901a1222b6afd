"""Returns, values and advantage labels of recorded episodes (RECAP, π*0.6, arXiv 2511.14759).

A step costs 1 until the episode succeeds, and a failure costs ``failure`` times the longest episode
of its task. Returns are not discounted, and divided by the lowest one that is possible, so that
they are in [-1, 0]: 0 at a success, -1 at the beginning of the longest failure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BINS = 201
"""Values of a predicted distribution, equally spaced in [-1, 0]."""


def returns_to_go(length: int, success: bool, longest: int, failure: float) -> Tensor:
    """Return the normalised return from each step of an episode on, float32 ``[length]``.

    ``longest``: steps of the task's longest episode. Its last step costs nothing if it succeeds.
    """
    remaining = torch.arange(length - 1, -1, -1, dtype=torch.float64)
    if not success:
        remaining = remaining + failure * longest
    return (-remaining / ((1 + failure) * longest)).float()


def centres(device: torch.device | None = None) -> Tensor:
    """Return the values of the bins, float32 ``[BINS]``."""
    return torch.linspace(-1, 0, BINS, device=device)


def two_hot(values: Tensor) -> Tensor:
    """Return the distribution over the two nearest bins whose mean is ``values``, ``[N, BINS]``.

    Values beyond [-1, 0] count as the nearest bound (C51's projection, arXiv 1707.06887, eq. 7).
    """
    place = (values.double().clamp(-1, 0) + 1) * (BINS - 1)
    below = place.floor().clamp(max=BINS - 2)
    upper = place - below
    target = torch.zeros(len(values), BINS, dtype=torch.float64, device=values.device)
    target.scatter_(1, below.long()[:, None], (1 - upper)[:, None])
    target.scatter_(1, below.long()[:, None] + 1, upper[:, None])
    return target.float()


def expected(logits: Tensor) -> Tensor:
    """Return the mean of the distributions, float32 ``[N]``; ``logits``: ``[N, BINS]``."""
    return logits.float().softmax(dim=-1) @ centres(logits.device)


def advantages(returns: Tensor, values: Tensor, steps: int) -> Tensor:
    """Return the advantage of each step of an episode, float32 ``[L]``.

    That of the next ``steps`` actions: what they earn, and the change of the value over them. Where
    the episode ends earlier, that of all actions to its end.
    """
    ahead = values.new_zeros(len(values))
    earned = returns.clone()
    inside = max(0, len(values) - steps)
    ahead[:inside] = values[steps:]
    earned[:inside] -= returns[steps:]
    return earned + ahead - values


def best(advantage: Tensor, share: float, always: Tensor) -> Tensor:
    """Return which steps are the best ``share`` of all, or are so ``always``: bool ``[N]``.

    Of equal advantages at the boundary, all are. ``always``: bool ``[N]``, such as the actions of a
    person.
    """
    count = math.ceil(share * len(advantage))
    return (advantage >= advantage.topk(count).values[-1]) | always


def longest_of(tasks: Sequence[str], lengths: Sequence[int]) -> dict[str, int]:
    """Return the number of steps of each task's longest episode."""
    found: dict[str, int] = {}
    for task, length in zip(tasks, lengths, strict=True):
        found[task] = max(length, found.get(task, 0))
    return found

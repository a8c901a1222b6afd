"""Distributions of the numbers of an action, with exact divergences.

Every tensor is ``[B, C, D, ...]``: of each number of a chunk, given those before it.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class Distribution:
    """What each number of a chunk is drawn from."""

    @abstractmethod
    def divergence(self, other: Any) -> Tensor:
        """Return ``KL(self || other)`` ``[B, C, D]`` in nats; ``other`` is of the same kind."""


@dataclass(frozen=True)
class Categorical(Distribution):
    """Each number is one of ``K``: ``log_prob`` ``[B, C, D, K]``.

    ``numbers``: ``[K, D]``, in the environment's units. Two distributions can be compared only if
    theirs are equal.
    """

    log_prob: Tensor
    numbers: Tensor

    def divergence(self, other: Categorical) -> Tensor:
        return (self.log_prob.exp() * (self.log_prob - other.log_prob)).sum(-1)


@dataclass(frozen=True)
class Gaussian(Distribution):
    """Each number is normal: ``mean`` and ``log_std`` ``[B, C, D]``."""

    mean: Tensor
    log_std: Tensor

    def divergence(self, other: Gaussian) -> Tensor:
        ratio = self.log_std - other.log_std
        distance = (self.mean - other.mean) * (-other.log_std).exp()
        return 0.5 * ((2 * ratio).exp() + distance**2 - 1) - ratio

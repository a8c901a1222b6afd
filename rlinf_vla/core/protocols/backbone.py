"""The backbone of a split policy, seen from the machine of its head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from rlinf_vla.core.types import Inputs, Observation, Tensors


class BackboneElsewhere(Protocol):
    """The backbone of a split policy, which another machine runs for the head here."""

    def prepare(self, obs: Observation) -> Inputs:
        """Return what ``encode`` takes of an observation."""

    def encode(self, inputs: Inputs) -> Tensors:
        """Return the packed features of ``inputs``, on the CPU. Raises Failure."""

    def trained(self, weights: Mapping[str, Tensor]) -> Tensors:
        """Take note of the trained weights of the whole policy, by full name, which replace those
        noted before; return those of the head."""

    def begin_control(self) -> None:
        """See ``Policy``."""

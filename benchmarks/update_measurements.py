"""Hold the results of ``rlinf-vla bench update``: rates, memory and ratios between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.benchmarks import roofline
from rlinf_vla.features.planner import work as counting
from rlinf_vla.telemetry.measurement import nbytes, peak_growth, time_interleaved


@dataclass(frozen=True)
class Work:
    """One kind of measured work: each ``call`` does ``amount`` of ``unit``; ``model``: at least."""

    call: Callable[[], Any]
    amount: float
    unit: str
    model: counting.Work | None = None
    """None: not counted."""


@dataclass(frozen=True)
class Rate:
    """Rate of the fastest (least disturbed) of ``calls`` calls; what it reached of the limits."""

    unit: str
    per_s: float
    best_s: float
    calls: int
    reached: roofline.Reached | None


@dataclass(frozen=True)
class Memory:
    """Bytes that an update needs, part by part, and its measured ``peak``.

    ``optimizer``: Adam's two moments and other state that is kept between steps. ``activations``:
    the most that autograd held at a time for backward passes. ``data``: the training data.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    data: int
    peak: int

    @property
    def expected(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.data

    @property
    def ratio(self) -> float:
        return self.peak / self.expected


@dataclass
class UpdateMeasurements:
    title: str
    limits: roofline.Limits
    rates: dict[str, Rate] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    """Largest relative differences between results that should be the same."""

    def time(
        self,
        kinds: Mapping[str, Work],
        device: torch.device,
        calls: int,
        warmup: int = 0,
        limit: float = float("inf"),
    ) -> None:
        """Measure each kind in turns; ``limit``: seconds after which no further turn starts."""
        seconds = time_interleaved(
            {name: work.call for name, work in kinds.items()}, device, calls, warmup, limit
        )
        for name, work in kinds.items():
            best = min(seconds[name])
            reached = None if work.model is None else self.limits.reached(work.model, best)
            self.rates[name] = Rate(
                work.unit, work.amount / best, best, len(seconds[name]), reached
            )

    def compare(self, label: str, first: str, second: str) -> None:
        """Store the ratio of the rates ``first`` / ``second``."""
        self.ratios[label] = self.rates[first].per_s / self.rates[second].per_s

    def document(self) -> dict[str, Any]:
        memory = {
            name: asdict(entry) | {"expected": entry.expected, "ratio": entry.ratio}
            for name, entry in self.memory.items()
        }
        return asdict(self) | {"memory": memory}


def measured_memory(
    update: Callable[[], Any],
    weights: Sequence[Tensor],
    trained: Sequence[Tensor],
    data: Sequence[Tensor],
    kept: int,
    activations: int,
    computed: int = 0,
) -> Memory:
    """Measure a trainer's first ``update``, which allocates the gradients and Adam's moments.

    Allocated before: the policy's ``weights`` (``trained`` among them), the ``data``, and ``kept``
    bytes of other trainer state. ``activations``: see :class:`Memory`. ``computed``: bytes of data
    that the update itself adds.
    """
    for parameter in trained:
        parameter.grad = None
    present = nbytes([*weights, *data]) + kept
    learning = nbytes(trained)
    peak = present + peak_growth(update, weights[0].device)
    return Memory(
        nbytes(weights), learning, 2 * learning + kept, activations, nbytes(data) + computed, peak
    )

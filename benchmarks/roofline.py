"""Roofline analysis: a call's FLOPs and weight bytes against measured limits of the device.

After Williams, Waterman and Patterson, "Roofline" (2009).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from rlinf_vla.telemetry.measurement import time_interleaved

REPEATS = 5
_GATHERS = ("embedding", "index_select", "index")


@dataclass(frozen=True)
class Work:
    """flops: matrix products, convolutions, attention. bytes: weights, per operation that reads."""

    flops: int
    bytes: int


@dataclass(frozen=True)
class Limits:
    flops_per_s: float
    bytes_per_s: float

    def least_seconds(self, work: Work) -> float:
        """Return the lower bound on the duration of a call that does ``work``."""
        return max(work.flops / self.flops_per_s, work.bytes / self.bytes_per_s)


class _WeightTraffic(TorchDispatchMode):
    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self._sizes = {weight.untyped_storage().data_ptr(): weight.numel() * weight.element_size() for weight in weights}
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gathers = function.overloadpacket.__name__ in _GATHERS  # these read only the selected rows
        if not gathers and not function.is_view:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.bytes += sum(self._sizes.get(tensor.untyped_storage().data_ptr(), 0) for tensor in tensors)
        return function(*args, **(kwargs or {}))


def work(call: Callable[[], Any], weights: Iterable[Tensor]) -> Work:
    """Count the work of one ``call``, which must not replay a CUDA graph."""
    with FlopCounterMode(display=False) as flops, _WeightTraffic(weights) as traffic:
        call()
    return Work(flops.get_total_flops(), traffic.bytes)


def measured_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """Measure with a large matrix product and a large copy (read and write), best of REPEATS."""
    size, count = (8192, 2**28) if device.type == "cuda" else (1024, 2**26)
    a = torch.randn(size, size, device=device).to(dtype)
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = _best(lambda: a @ a, device)
    copy = _best(lambda: target.copy_(source), device)
    return Limits(2 * size**3 / product, 2 * count / copy)


def _best(call: Callable[[], Any], device: torch.device) -> float:
    return min(time_interleaved({"it": call}, device, REPEATS)["it"])

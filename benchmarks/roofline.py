"""Roofline analysis: a call's FLOPs and bytes against what the device can do.

After Williams, Waterman and Patterson, "Roofline" (2009).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from rlinf_vla.telemetry.measurement import time_interleaved

REPEATS = 5
_GATHERS = ("embedding", "index_select", "index")

DATASHEETS = {
    "NVIDIA H100 80GB HBM3": (989.4, 66.9, 3350),
    "NVIDIA H100 PCIe": (756.0, 51.0, 2000),
    "NVIDIA H200": (989.4, 66.9, 4800),
    "NVIDIA A100-SXM4-80GB": (312.0, 19.5, 2039),
    "NVIDIA A100 80GB PCIe": (312.0, 19.5, 1935),
    "NVIDIA L40S": (362.0, 91.6, 864),
    "NVIDIA GeForce RTX 4090": (165.2, 82.6, 1008),
}
"""PyTorch's name of a GPU -> 10¹² FLOP/s in dense bfloat16 matrix products with float32 sums, in
float32 without TF32, and 10⁹ bytes/s of its memory. Sources: NVIDIA's datasheets (without their
factor 2 for sparsity), and the Ada whitepaper, appendix A, for the RTX 4090."""


@dataclass(frozen=True)
class Work:
    """What a call does at least.

    flops: matrix products, convolutions, attention. bytes: weights, per operation that reads them,
    and the other operands and results of the operations that ``flops`` counts. (Other operations
    could be fused with those.)
    """

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Work:
        return Work(self.flops * times, self.bytes * times)


@dataclass(frozen=True)
class Limits:
    """Peaks of a device; ``source``: ``datasheet`` or ``measured``."""

    flops_per_s: float
    bytes_per_s: float
    source: str = "measured"

    def least_seconds(self, work: Work) -> float:
        """Return the lower bound on the duration of a call that does ``work``."""
        return max(work.flops / self.flops_per_s, work.bytes / self.bytes_per_s)

    def described(self) -> str:
        return f"{self.flops_per_s / 1e12:.3g} TFLOP/s, {self.bytes_per_s / 1e9:.4g} GB/s ({self.source})"

    def reached(self, work: Work, seconds: float) -> Reached:
        """Return the shares of the limits that ``work`` in ``seconds`` reaches."""
        return Reached(work.flops / seconds / self.flops_per_s, self.least_seconds(work) / seconds)


@dataclass(frozen=True)
class Reached:
    """mfu: model FLOP utilisation, the call's FLOPs per second divided by the device's peak.

    of_roofline: the least time in which the device can do the work, divided by the time it took.
    """

    mfu: float
    of_roofline: float

    def described(self) -> tuple[str, str]:
        return f"{100 * self.mfu:.1f} %", f"{100 * self.of_roofline:.0f} %"


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of attention on ``[B, heads, length, size]``: two products, whatever the mask."""
    return 2 * prod(query.shape[:3]) * key.shape[2] * (query.shape[3] + value.shape[3])


def _attention_backward(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> int:
    """FLOPs of four products. The kernels compute a fifth again, which is no work of the model."""
    return 2 * _attention(query, key, value)


def _formulas() -> dict[Any, Callable[..., int]]:
    """Return PyTorch's table, whose attention lacks the CPU's kernels, with ours for attention."""
    found = dict(flop_registry)
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"):
        found[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")] = _attention
        found[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward")] = _attention_backward
    return found


class _Counter(TorchDispatchMode):
    """Counts like PyTorch's FlopCounterMode, whose hooks on modules fail in inference mode."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        # by storage, not by address: tensors on the meta device have none
        self._sizes = {weight.untyped_storage()._cdata: weight.numel() * weight.element_size() for weight in weights}
        self._formulas = _formulas()
        self.flops = self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation, kwargs = function.overloadpacket, kwargs or {}
        formula = self._formulas.get(operation)
        if formula is None and function is not torch.ops.prim.device.default:
            with self:  # in inference mode there is no autograd that would have decomposed it
                found = function.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        found = function(*args, **kwargs)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=found)
        if operation.__name__ in _GATHERS or function.is_view:  # a gather reads only the selected rows
            return found
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self.bytes += self._sizes.get(leaf.untyped_storage()._cdata, 0 if formula is None else leaf.nbytes)
        if formula is not None:
            self.bytes += sum(leaf.nbytes for leaf in tree_leaves(found) if isinstance(leaf, Tensor))
        return found


def work(call: Callable[[], Any], weights: Iterable[Tensor]) -> Work:
    """Count the work of one ``call``, which must not replay a CUDA graph.

    What gradient checkpointing computes again is counted, too.
    """
    with _Counter(weights) as found:
        call()
    return Work(found.flops, found.bytes)


def limits_of(device: torch.device, dtype: torch.dtype) -> Limits:
    """Return the peaks of a known GPU by its datasheet, of any other device as measured now."""
    known = DATASHEETS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if known is None or dtype not in (torch.bfloat16, torch.float32):
        return measured_limits(device, dtype)
    low, full, bandwidth = known
    return Limits(1e12 * (low if dtype == torch.bfloat16 else full), 1e9 * bandwidth, "datasheet")


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

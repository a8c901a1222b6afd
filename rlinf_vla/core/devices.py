"""Move tensors between devices.

What a simulator shows, and what a policy computes, stays where it is made. Rollouts, replay records
and demonstrations are stored on the CPU. A policy's inputs cross to its device here, and its
results cross back: in rollouts once per call (``rollout/actor.py``), in updates once per
micro-batch (``training/ranks.py``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")
_fused_kernels = True
_meta_tensors_as = "meta"
_sharers = 1
MEMORY = "memory/"
"""Beginning of the names of metrics that are peaks."""
_ALIGNMENT = 64
"""Bytes; as of a fresh allocation, because the last bit of some results depends on it."""


def set_tf32(wanted: bool) -> None:
    """Compute float32 products and convolutions in TF32, on CUDA, or exactly, in this process.

    TF32 keeps 11 significant bits of what is multiplied, and sums in float32. It is what
    ``torch.set_float32_matmul_precision("high")`` selects, and PyTorch's default for convolutions.
    """
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    torch.backends.cudnn.allow_tf32 = wanted


def uses_tf32(device: torch.device) -> bool:
    """Return whether float32 products on ``device`` are in TF32."""
    return device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"


def set_fused_kernels(wanted: bool) -> None:
    """Allow models on CUDA to use fused kernels (``models/fused.py``) in this process, or not."""
    global _fused_kernels
    _fused_kernels = wanted


def allows_fused_kernels(device: torch.device) -> bool:
    return _fused_kernels and computes_on_cuda(device)


def computes_on_cuda(device: torch.device) -> bool:
    """Return whether tensors on ``device`` are computed as on CUDA; see ``meta_tensors_as``."""
    return (_meta_tensors_as if device.type == "meta" else device.type) == "cuda"


@contextmanager
def meta_tensors_as(device: str) -> Iterator[None]:
    """Within the context models take the paths of ``device`` for tensors on the meta device."""
    global _meta_tensors_as
    before, _meta_tensors_as = _meta_tensors_as, device
    try:
        yield
    finally:
        _meta_tensors_as = before


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters; the CPU if it has none."""
    return next((parameter.device for parameter in module.parameters()), CPU)


def moved(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return ``tensors`` on ``device``; those on the same other device cross in one copy.

    Tensors that are there already are returned as they are. The others share one storage. A copy to
    a GPU is asynchronous, from pinned memory; a copy from it waits for the GPU.
    """
    elsewhere: dict[torch.device, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if value.device.type != device.type or (
            device.index is not None and value.device != device
        ):
            elsewhere.setdefault(value.device, {})[name] = value
    if not elsewhere:
        return tensors
    result = dict(tensors)
    for source, values in elsewhere.items():
        result |= _copied(values, source, device)
    return result


def _copied(
    tensors: dict[str, Tensor], source: torch.device, device: torch.device
) -> dict[str, Tensor]:
    ends = {}
    end = 0
    for name, value in tensors.items():
        ends[name] = end, end + value.nbytes
        end += math.ceil(value.nbytes / _ALIGNMENT) * _ALIGNMENT
    pinned = source.type == "cpu" and device.type == "cuda"
    packed = torch.empty(end, dtype=torch.uint8, device=source, pin_memory=pinned)
    for name, value in tensors.items():
        _part(packed, ends[name], value).copy_(value)
    there = packed.to(device, non_blocking=pinned)
    return {name: _part(there, ends[name], value) for name, value in tensors.items()}


def _part(packed: Tensor, span: tuple[int, int], like: Tensor) -> Tensor:
    return packed[slice(*span)].view(like.dtype).view(like.shape)


@contextmanager
def measured_memory(device: torch.device) -> Iterator[dict[str, float]]:
    """Yield a dictionary that gets the peaks of PyTorch's memory on ``device`` in this context.

    It stays empty on a CPU. ``reserved`` is what the allocator took from the GPU; each of its
    retries means that it was nearly full.
    """
    peaks: dict[str, float] = {}
    if device.type != "cuda":
        yield peaks
        return
    torch.cuda.reset_peak_memory_stats(device)
    yield peaks
    statistics = torch.cuda.memory_stats(device)
    peaks[f"{MEMORY}update_gb"] = statistics["active_bytes.all.peak"] / 1e9
    peaks[f"{MEMORY}reserved_gb"] = statistics["reserved_bytes.all.peak"] / 1e9
    peaks[f"{MEMORY}allocation_retries"] = float(statistics["num_alloc_retries"])


def share_cores(processes: int) -> None:
    """Let ``own_cores`` of this process be one of ``processes`` equal parts of the machine's."""
    global _sharers
    _sharers = processes


def own_cores() -> int:
    """Return how many cores this process and its simulators are to keep busy, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // _sharers)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Set the number of PyTorch CPU threads within the context; None: all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Move tensors between devices, and ask accelerators: CUDA's (and ROCm's), Ascend's, Intel's.

What a simulator shows, and what a policy computes, stays where it is made. Rollouts, replay records
and demonstrations are stored on the CPU. A policy's inputs cross to its device here, and its
results cross back: in rollouts once per call (``rollout/actor.py``), in updates once per
micro-batch (``training/ranks.py``).

Which accelerator there is, ``torch.accelerator`` tells; its memory is asked of its own module, such
as ``torch.cuda``, because Ascend's does not answer through ``torch.accelerator``. What only CUDA
has asks ``computes_on_cuda`` or ``uses_tf32``; CUDA graphs are in ``RECORDERS`` of
``rollout/actor.py``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_vla.config.errors import UserError

CPU = torch.device("cpu")
_fused_kernels = True
_meta_tensors_as = "meta"
_sharers = 1
MEMORY = "memory/"
"""Beginning of the names of metrics that are peaks."""
_ALIGNMENT = 64
"""Bytes; as of a fresh allocation, because the last bit of some results depends on it."""
_NEEDS = {
    "cuda": "a GPU, and PyTorch for CUDA or ROCm",
    "npu": "an Ascend NPU, CANN and the package torch_npu",
    "xpu": "an Intel GPU, and PyTorch for XPU",
    "mps": "a Mac with Apple silicon",
}
"""Type of device -> what PyTorch must find."""


def accelerator(name: str) -> Any:
    """Return PyTorch's module of an accelerator, such as ``torch.cuda`` for "cuda".

    Raises UserError if PyTorch has no such device here, or if the device has no float64, in which
    random numbers and norms of gradients are computed.
    """
    here = torch.accelerator.current_accelerator(check_available=True)
    fix = (
        "use cluster=laptop with cluster.device=cpu, cluster=1gpu where there is a GPU, "
        "or describe your machines in cluster.nodes"
    )
    if here is None or here.type != name:
        raise UserError(
            f"this machine has no {name.upper()} device that PyTorch sees (cluster.device={name}), "
            f"which takes {_NEEDS[name]}: {fix}"
        )
    if name != "cuda":  # it has float64, and simulators cannot be forked once it is initialised
        try:
            torch.ones(1, dtype=torch.float64, device=name).log()
        except (RuntimeError, TypeError) as error:
            raise UserError(
                f"cluster.device={name} cannot compute in float64 ({str(error).splitlines()[0]}): {fix}"
            ) from None
    return torch.get_device_module(name)


def is_accelerator(device: torch.device) -> bool:
    """Return whether ``device`` is one of this machine's accelerator."""
    here = torch.accelerator.current_accelerator()
    return here is not None and here.type == device.type


def synchronise(device: torch.device) -> None:
    """Wait for the accelerator, which works asynchronously; does nothing on CPU."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def free_cache() -> None:
    """Give memory that no tensor uses any more back to the accelerator, if there is one."""
    if torch.accelerator.is_available():
        torch.get_device_module().empty_cache()


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
    an accelerator is asynchronous, from pinned memory; a copy from it waits for it.
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
    pinned = source.type == "cpu" and is_accelerator(device)
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

    It stays empty on a CPU. ``reserved`` is what the allocator took from the accelerator; each of
    its retries means that it was nearly full.
    """
    peaks: dict[str, float] = {}
    if not is_accelerator(device):
        yield peaks
        return
    module = torch.get_device_module(device)
    module.reset_peak_memory_stats(device)
    yield peaks
    statistics = module.memory_stats(device)
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

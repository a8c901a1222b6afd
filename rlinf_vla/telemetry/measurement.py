"""Measure computations: seconds of calls, memory, and what this process's descendants use."""

from __future__ import annotations

import ctypes
import gc
import re
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rlinf_vla.core.devices import is_accelerator, synchronise


class Usage(NamedTuple):
    """processes: number alive; cpu: core-seconds so far; resident: bytes."""

    processes: int
    cpu: float
    resident: int


def usage() -> Usage:
    """Return the current usage of this process's descendants."""
    processes = 0
    cpu = 0.0
    resident = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess), child.oneshot():  # it may end meanwhile
            if child.status() != psutil.STATUS_ZOMBIE:
                times, memory = child.cpu_times(), child.memory_info()
                processes = processes + 1
                cpu = cpu + times.user + times.system
                resident = resident + memory.rss
    return Usage(processes, cpu, resident)


def time_interleaved(
    kinds: Mapping[str, Callable[[], Any]],
    device: torch.device,
    calls: int,
    warmup: int = 0,
    limit: float = float("inf"),
) -> dict[str, list[float]]:
    """Return the seconds of ``calls`` calls per kind, interleaved so that other load affects all.

    ``limit``: seconds after which no further turn starts.
    """
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    end = time.perf_counter() + limit
    for turn in range(warmup + calls):
        for kind, call in kinds.items():
            synchronise(device)
            started = time.perf_counter()
            call()
            synchronise(device)
            if turn >= warmup:
                seconds[kind].append(time.perf_counter() - started)
        if turn >= warmup and time.perf_counter() > end:
            break
    return seconds


def resident(which: str, process: int | str = "self") -> int:
    """Return a process's resident bytes: current (``VmRSS``; without mapped files ``RssAnon``) or
    peak so far (``VmHWM``). Raises OSError or LookupError if it has ended."""
    match = re.search(rf"{which}:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    if match is None:
        raise LookupError(f"process {process} has no memory")
    return int(match[1]) * 1024


def peak_growth(call: Callable[[], Any], device: torch.device) -> int:
    """Return the peak bytes of ``call`` above those before it, on ``device``."""
    gc.collect()
    if is_accelerator(device):
        module = torch.get_device_module(device)
        module.reset_peak_memory_stats(device)
        before: int = module.memory_allocated(device)
        call()
        return int(module.max_memory_allocated(device)) - before
    ctypes.CDLL(None).malloc_trim(
        0
    )  # otherwise reuse of freed but still resident memory is not counted
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark (proc(5))
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def saved_for_backward(call: Callable[[], Any], besides: Iterable[Tensor] = ()) -> int:
    """Return the peak bytes autograd saved for backward in ``call``, without those of ``besides``.

    Tensors recomputed by gradient checkpointing pass through separate hooks and are not counted.
    Tensors may be on the meta device.
    """
    excluded = {tensor.untyped_storage()._cdata for tensor in besides}
    holders: Counter[int] = Counter()
    now = most = 0

    def release(storage: int, size: int) -> None:
        nonlocal now
        holders[storage] -= 1
        now -= 0 if holders[storage] else size

    def pack(tensor: Tensor) -> _Saved:
        nonlocal now, most
        saved = _Saved(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata  # not its address in memory: a meta tensor has none
        if key not in excluded:
            now += 0 if holders[key] else storage.nbytes()
            holders[key] += 1
            most = max(most, now)
            weakref.finalize(saved, release, key, storage.nbytes())
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved.tensor):
        call()
    return most


class _Saved:
    """Wrapper whose lifetime is that of the graph node that saved ``tensor``."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all elements; tensors with the same data pointer count once."""
    return sum(
        {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values()
    )

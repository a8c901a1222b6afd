"""What a computation keeps in memory: measured from outside, and counted from within."""

from __future__ import annotations

import ctypes
import gc
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_PROC = Path("/proc/self")


def resident(which: str) -> int:
    """Bytes of this process in physical memory: now (``VmRSS``) or at most so far (``VmHWM``)."""
    found = re.search(rf"{which}:\s+(\d+) kB", (_PROC / "status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def peak_growth(call: Callable[[], Any], device: torch.device) -> int:
    """By how many bytes memory stood higher, at most, during ``call`` than before it: the device's own, or this process's on a CPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    ctypes.CDLL(None).malloc_trim(0)  # what was freed and kept would be used again unseen
    (_PROC / "clear_refs").write_text("5")  # the high-water mark starts anew (proc(5))
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def saved_for_backward(call: Callable[[], Any], besides: Iterable[Tensor] = ()) -> int:
    """The most bytes that autograd held at a time for backward passes during ``call``; storage of ``besides`` is not counted.

    What gradient checkpointing computes again goes through hooks of its own and is not seen.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in besides}
    holders: Counter[int] = Counter()
    now = most = 0

    def release(storage: int, size: int) -> None:
        nonlocal now
        holders[storage] -= 1
        now -= 0 if holders[storage] else size

    def pack(tensor: Tensor) -> _Saved:
        nonlocal now, most
        saved, storage = _Saved(tensor), tensor.untyped_storage()
        if storage.data_ptr() not in known:
            now += 0 if holders[storage.data_ptr()] else storage.nbytes()
            holders[storage.data_ptr()] += 1
            most = max(most, now)
            weakref.finalize(saved, release, storage.data_ptr(), storage.nbytes())
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved.tensor):
        call()
    return most


class _Saved:
    """Lives as long as the node of the graph that needs ``tensor``."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Of their elements; what appears twice counts once."""
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())

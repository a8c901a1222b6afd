"""Time calls on a machine that other processes use as well."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def time_interleaved(
    kinds: Mapping[str, Callable[[], Any]], device: torch.device, calls: int, warmup: int = 0, limit: float = float("inf")
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


def synchronise(device: torch.device) -> None:
    """Wait for the GPU, which works asynchronously; does nothing on CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

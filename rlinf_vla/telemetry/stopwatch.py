"""Seconds that calls take, on a machine that others disturb."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def in_turns(
    kinds: Mapping[str, Callable[[], Any]], device: torch.device, calls: int, warmup: int = 0, limit: float = float("inf")
) -> dict[str, list[float]]:
    """Seconds of ``calls`` calls of each kind; they take turns, so that whatever else the machine does hits all alike.

    ``limit``: seconds after which no further turn is begun.
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
    """A GPU works on after a call has returned."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

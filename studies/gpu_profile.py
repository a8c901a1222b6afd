"""A part of studies/prove_gpu.py: which kernels take the time of policy calls and of updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_kit import Kit
from torch.profiler import ProfilerActivity, profile

SHOWN = 6
"""Kernels listed of each call, the costliest first."""
REPEATS = 3


def costs(kit: Kit, name: str, call: Callable[[], Any]) -> None:
    """Add rows: the time of ``call`` during which the GPU computes, and its costliest kernels."""
    activity = ProfilerActivity.CUDA if kit.device.type == "cuda" else ProfilerActivity.CPU
    for _ in range(2):
        call()
    with profile(activities={ProfilerActivity.CPU, activity}) as profiler:
        for _ in range(REPEATS):
            call()
        if kit.device.type == "cuda":
            torch.cuda.synchronize()
    on_device = activity == ProfilerActivity.CUDA
    print(
        profiler.key_averages().table(
            sort_by="self_cuda_time_total" if on_device else "self_cpu_time_total", row_limit=40
        )
    )
    events = [
        event
        for event in profiler.events()
        if (event.device_type.name == "CUDA") == on_device and not event.is_user_annotation
    ]
    kernels: dict[str, list[float]] = {}
    for event in events:
        kernels.setdefault(event.name, []).append(
            event.self_device_time_total if on_device else event.self_cpu_time_total
        )
    total = sum(map(sum, kernels.values()))
    span = max(event.time_range.end for event in events) - min(
        event.time_range.start for event in events
    )
    busy = f"{total / 1e3 / REPEATS:.2f} ms of {span / 1e3 / REPEATS:.2f} ms, {sum(map(len, kernels.values())) // REPEATS} kernels"
    kit.add(f"{name}: the device computes for", busy)
    for kernel, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:SHOWN]:
        share = f"{100 * sum(times) / total:.1f} %, {len(times) // REPEATS} calls of {sum(times) / len(times):.1f} µs"
        kit.add(f"{name}: `{kernel[:90].replace('|', ' ')}`", share)

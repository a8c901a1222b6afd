"""Measure how fast a device multiplies matrices and copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlinf_vla.config.cluster import NodeConfig
from rlinf_vla.features.planner.devices import Device
from rlinf_vla.telemetry.measurement import time_interleaved

REPEATS = 5
SIZES = {"cpu": (1024, 2**26)}
LARGE = (8192, 2**28)
"""Rows and columns of a matrix, and bytes of a copy; on the CPU less."""


def products_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a product of square matrices, the best of ``REPEATS``."""
    side, _ = SIZES.get(device.type, LARGE)
    matrix = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / _best(lambda: matrix @ matrix, device)


def copied_per_s(device: torch.device) -> float:
    """Return the bytes per second, read and written, of a copy on ``device``."""
    _, count = SIZES.get(device.type, LARGE)
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * count / _best(lambda: target.copy_(source), device)


def sent_per_s(device: torch.device) -> float:
    """Return the bytes per second of a copy from ``device`` to pageable main memory."""
    _, count = SIZES.get(device.type, LARGE)
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty(count, dtype=torch.uint8)
    return count / _best(lambda: target.copy_(source), device)


def measured_rates(device: torch.device, node: NodeConfig) -> Device:
    """Measure ``device``, in seconds; ``node`` describes its machine."""
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        tf32 = products_per_s(device, torch.float32)
        torch.set_float32_matmul_precision("highest")
        fp32 = products_per_s(device, torch.float32)
    finally:
        torch.set_float32_matmul_precision(precision)
    return Device(
        bf16=products_per_s(device, torch.bfloat16) / 1e12,
        tf32=tf32 / 1e12,
        fp32=fp32 / 1e12,
        bandwidth=copied_per_s(device) / 1e9,
        memory=node.gpu_memory_gb,
        host=sent_per_s(device) / 1e9,
        bus=node.gpu_link_gbps / 8,
    )


def _best(call: Callable[[], Any], device: torch.device) -> float:
    return min(time_interleaved({"it": call}, device, REPEATS)["it"])

"""Roofline analysis: a call's FLOPs and bytes against what the device can do.

After Williams, Waterman and Patterson, "Roofline" (2009). ``planner/work.py`` counts the work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlinf_vla.features.planner.devices import DEVICES
from rlinf_vla.features.planner.rates import copied_per_s, products_per_s
from rlinf_vla.features.planner.work import Work
from rlinf_vla.runtime.machines import this_machine


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


def limits_of(device: torch.device, dtype: torch.dtype) -> Limits:
    """Return the peaks of a known GPU by its datasheet, of any other device as measured now."""
    datasheet = DEVICES.get(this_machine(device.type).device)
    if datasheet is None or dtype not in (torch.bfloat16, torch.float32):
        return measured_limits(device, dtype)
    return Limits(
        1e12 * (datasheet.bf16 if dtype == torch.bfloat16 else datasheet.fp32),
        1e9 * datasheet.bandwidth,
        "datasheet",
    )


def measured_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """Measure with a large matrix product and a large copy (read and write)."""
    return Limits(products_per_s(device, dtype), copied_per_s(device))

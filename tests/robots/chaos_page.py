"""Writes docs/results/robot_chaos.md."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median

import numpy as np
from chaos import Round

HEAD = """# Repeated faults

`make robot-chaos ROUNDS=N` writes this table. A run of some of its tests replaces their rows; each
row says when it was measured. Newest rows:
{where}.

Each fault is injected at a random moment while the arm moves, in a session that continues from
round to round. "Stopped": seconds from the fault to the last moment at which a joint was faster
than 0.05 rad/s, as the simulator reports it every 5 ms (on the virtual clock: the tool faster than
0.1 mm/s). A round also fails if the fault is not latched and named, if the data seen until then is
not on the disk, if anything but an acknowledgement clears the fault, or if the session does not
continue after that. The bounds are those of [robot_safety.md](../robot_safety.md).

"""
COLUMNS = """| fault | where | measured | rounds | failed | bound s | stopped s, median | maximum |
|---|---|---|---|---|---|---|---|
"""
FAILURES = "\nFailures of the newest run:\n\n"


def page(rounds: Sequence[Round], before: str) -> str:
    """``before``: the page so far, of which other rows and the remarks below the table stay."""
    rows, _, after = before.partition(COLUMNS)[2].partition("\n\n")
    table = {tuple(row.split(" | ")[:2]): row for row in rows.splitlines()}
    wrong = []
    for fault, where in dict.fromkeys((each.fault, each.where) for each in rounds):
        these = [each for each in rounds if (each.fault, each.where) == (fault, where)]
        stood = [each.stood_s for each in these if not np.isnan(each.stood_s)]
        bad = [each.wrong for each in these if each.wrong is not None]
        times = (
            f"{these[0].stated_s:.2f} | {median(stood):.2f} | {max(stood):.2f}"
            if stood
            else "continues | |"
        )
        key = f"| {fault.replace('_', ' ')}", where
        table[key] = f"{' | '.join(key)} | {date.today()} | {len(these)} | {len(bad)} | {times} |"
        wrong += [f"* {fault}, {where}: {each}\n" for each in bad]
    remarks = after.partition(FAILURES)[0].rstrip("\n")
    found = HEAD.format(where=machine()) + COLUMNS + "\n".join(table.values()) + "\n"
    return (
        found + (f"\n{remarks}\n" if remarks else "") + (FAILURES + "".join(wrong) if wrong else "")
    )


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
    return f"{os.cpu_count()} cores of {model}, Linux {platform.release()}, load {os.getloadavg()[1]:.1f}"

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

`make robot-chaos ROUNDS={rounds}`, {today}: {where}.

Each fault is injected at a random moment while the arm moves, in a session that continues from
round to round. "Stopped": seconds from the fault to the last moment at which a joint was faster
than 0.05 rad/s, as the simulator reports it every 5 ms (on the virtual clock: the tool faster than
0.1 mm/s). A round also fails if the fault is not latched and named, if the data seen until then is
not on the disk, if anything but an acknowledgement clears the fault, or if the session does not
continue after that. The bounds are those of [robot_safety.md](../robot_safety.md).

| fault | where | rounds | failed | bound s | stopped s, median | maximum |
|---|---|---|---|---|---|---|
"""


def page(rounds: Sequence[Round]) -> str:
    lines, wrong = [], []
    for fault, where in dict.fromkeys((each.fault, each.where) for each in rounds):
        these = [each for each in rounds if (each.fault, each.where) == (fault, where)]
        stood = [each.stood_s for each in these if not np.isnan(each.stood_s)]
        bad = [each.wrong for each in these if each.wrong is not None]
        times = f"{these[0].stated_s:.2f} | {median(stood):.2f} | {max(stood):.2f}" if stood else "continues | |"
        lines.append(f"| {fault.replace('_', ' ')} | {where} | {len(these)} | {len(bad)} | {times} |\n")
        wrong += [f"* {fault}, {where}: {each}\n" for each in bad]
    head = HEAD.format(rounds=os.environ.get("ROBOT_CHAOS", "0"), today=date.today(), where=machine())
    return head + "".join(lines) + ("\nFailures:\n\n" + "".join(wrong) if wrong else "")


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} cores of {model}, Linux {platform.release()}, load {os.getloadavg()[1]:.1f}"

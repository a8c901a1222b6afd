"""Present a session in which a policy acted at a robot: tables, and ``report.html`` with films."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from rlinf_vla.telemetry import control_timing
from rlinf_vla.telemetry.page import machine_line, read_videos, write_page
from rlinf_vla.telemetry.run_files import CONTROL_FILE

HEADS = (
    "episode",
    "instruction",
    "outcome",
    "ended",
    "control periods",
    "steps by the operator",
    "limits that acted",
)


def episode_table(episodes: Sequence[dict[str, Any]]) -> Table:
    """Return one row per episode."""
    table = Table(*HEADS, show_edge=False)
    for cells in rows(episodes):
        table.add_row(*cells)
    return table


def rows(episodes: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the cells under HEADS of each episode of an evaluation file."""
    table = []
    for number, episode in enumerate(episodes, 1):
        outcome = (
            "success" if episode["success"] else "fault" if episode["stopped"] else "no success"
        )
        limits = ", ".join(f"{count} × {rule}" for rule, count in episode["interventions"].items())
        operator = f"{episode['by_operator']} of {episode['executed']}"
        table.append(
            [
                str(number),
                episode["instruction"],
                outcome,
                episode["ended"],
                str(episode["steps"]),
                operator,
                limits,
            ]
        )
    return table


def read_control(path: Path) -> dict[str, Any] | None:
    """Return the control loop's statistics, None if no episode has ended."""
    return json.loads(path.read_text()) if path.exists() else None


def write_report(directory: Path, name: str, policy: str, document: dict[str, Any]) -> Path:
    """Write ``directory/report.html`` atomically; return its path.

    ``document``: of an evaluation, with its ``episodes``.
    """
    episodes = document["episodes"]
    films = sorted((directory / "videos").glob("*.mp4"))
    videos, left_out, unreadable = read_videos([[(film, policy, film.stem)] for film in films])
    successes = sum(episode["success"] for episode in episodes)
    helped = sum(episode["by_operator"] > 0 for episode in episodes)
    return write_page(
        directory / "report.html",
        "robot_run.html",
        kind="Robot session",
        name=name,
        header=[
            f"{policy} ({document['checkpoint']}): {successes} successes in {len(episodes)} episodes, {helped} with the operator's help",
            machine_line(document["environment"]),
        ],
        heads=HEADS,
        rows=rows(episodes),
        control=control_timing.section(read_control(directory / CONTROL_FILE) or {}),
        videos=[video for group in videos for video in group],
        left_out=left_out + len(unreadable),
        environment=document["environment"],
    )

"""Find the runs in runs/, and the one that a short name means."""

from __future__ import annotations

from pathlib import Path

from rlinf_vla.config.errors import UserError
from rlinf_vla.runtime.run_directory import RECIPE, RUNS

LISTED = 3
"""Runs that the message about an ambiguous name lists."""


def all_runs() -> list[Path]:
    """Return the run directories runs/RECIPE/TIMESTAMP, by recipe and oldest first."""
    return sorted(path.parent for path in RUNS.glob(f"*/*/{RECIPE}"))


def named(name: str) -> Path:
    """Return the run that ``name`` means.

    ``name``: RECIPE/TIMESTAMP, TIMESTAMP, RECIPE if it has one run, or the start of one of these.
    Raises UserError if no run or several runs have it.
    """
    runs = all_runs()
    words = {run: (str(run.relative_to(RUNS)), run.name, run.parent.name) for run in runs}
    matches = [run for run in runs if name in words[run]]
    matches = matches or [run for run in runs if any(word.startswith(name) for word in words[run])]
    if not matches:
        raise UserError(
            f"run={name}: no such directory, and no run in {RUNS}/ has a name that begins so (`rlinf-vla runs` lists them)"
        )
    if len(matches) > 1:
        latest = sorted(matches, key=lambda run: run.name, reverse=True)[:LISTED]
        listed = ", ".join(str(run.relative_to(RUNS)) for run in latest)
        raise UserError(
            f"run={name} means {len(matches)} runs, give one of them (newest first): {listed}{', ...' if len(matches) > LISTED else ''}"
        )
    return matches[0]

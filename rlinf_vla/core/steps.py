"""The names of what a run has after a number of iterations: checkpoints, evaluations, videos."""

from __future__ import annotations

import re

PREFIX = "step_"
STEP = rf"{PREFIX}[0-9]+"
"""Pattern of the names."""


def step_name(iterations: int) -> str:
    """Return the name for a number of iterations."""
    return f"{PREFIX}{iterations:06d}"


def step_of(name: str) -> int | None:
    """Return the number of iterations in a name, or None if it is another name."""
    return int(name.removeprefix(PREFIX)) if re.fullmatch(STEP, name) else None

"""Locate the user's state directory. Standard library only: the arm's stop program needs it."""

from __future__ import annotations

import os
from pathlib import Path


def state() -> Path:
    """Return the user's ``rlinf-vla`` directory in XDG_STATE_HOME, else in ``~/.local/state``.

    Without HOME the password database decides, so it is the same without a login. Raises
    RuntimeError if there is no home.
    """
    given = Path(os.environ.get("XDG_STATE_HOME", "")).expanduser()
    return (given if given.is_absolute() else Path("~/.local/state").expanduser()) / "rlinf-vla"

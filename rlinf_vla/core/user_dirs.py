"""Locate the user's state directory, and name the user.

Standard library only: the arm's stop program needs it.
"""

from __future__ import annotations

import getpass
import os
from pathlib import Path


def state() -> Path:
    """Return the user's ``rlinf-vla`` directory in XDG_STATE_HOME, else in ``~/.local/state``.

    Without HOME the password database decides, so it is the same without a login. Raises
    RuntimeError if there is no home.
    """
    directory = Path(os.environ.get("XDG_STATE_HOME", "")).expanduser()
    return (
        directory if directory.is_absolute() else Path("~/.local/state").expanduser()
    ) / "rlinf-vla"


def user_name() -> str:
    """Return the name of this process's user, or the number that a container without names has."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"

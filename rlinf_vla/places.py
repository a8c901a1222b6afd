"""Where this machine keeps what outlives a session. Standard library only: also the program that stops an arm asks."""

from __future__ import annotations

import os
from pathlib import Path


def state() -> Path:
    """Of this user: XDG_STATE_HOME, else ``.local/state`` of HOME, else of the home that the password database knows; so it is the same
    with and without a login. Raises RuntimeError where there is none."""
    given = Path(os.environ.get("XDG_STATE_HOME", "")).expanduser()
    return (given if given.is_absolute() else Path("~/.local/state").expanduser()) / "rlinf-vla"

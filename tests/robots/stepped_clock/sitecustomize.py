"""Found on PYTHONPATH when a process starts: its wall clock is off by the seconds in the file $WALL_CLOCK_OFF, if it exists."""

import os
import time
from pathlib import Path

_true = time.time
_off = Path(os.environ["WALL_CLOCK_OFF"])


def stepped() -> float:
    return _true() + (float(_off.read_text()) if _off.exists() else 0.0)


time.time = stepped

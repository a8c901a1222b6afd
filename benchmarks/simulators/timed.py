"""Run episodes under the control of ``rlinf-vla bench env``. Uses only the standard library."""

from __future__ import annotations

import sys
from collections.abc import Callable


def timed(play: Callable[[int], None], episodes: int) -> None:
    """Call ``play(0)`` to warm up, then ``play(1 ... episodes)`` between ``begin`` and ``end``.

    Waits until standard input is closed, because the benchmark inspects the processes first.
    """
    play(0)
    print("begin", flush=True)
    for number in range(1, 1 + episodes):
        play(number)
    print("end", flush=True)
    sys.stdin.read()

"""Tests of the forks in which other tests work."""

from __future__ import annotations

import gc
import os

from tests.training.processes import in_process


class Cycle:
    """Garbage once it is made, which ends a process other than the one that made it."""

    def __init__(self) -> None:
        self.itself = self
        self.made_by = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.made_by:
            os._exit(7)


def test_a_fork_does_not_collect_garbage_of_its_parent() -> None:
    gc.disable()
    try:
        Cycle()
        assert in_process(gc.collect) == 0
    finally:
        gc.enable()

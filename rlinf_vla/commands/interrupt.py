"""Ctrl-C and SIGTERM: stop where nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(BaseException):
    """The run was asked to stop; the exit code is 128 + ``signum``."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


_PATIENCE = b"\nstopping as soon as nothing is lost by it; again: at once, back to the last checkpoint\n"


class Interrupt:
    """Remembers a signal until the run is at a place where it may stop; a second signal stops it at once."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.at_once = False

    def check(self) -> None:
        """Where nothing would be lost."""
        if self.signum is not None:
            raise Interrupted(self.signum)

    def check_at_once(self) -> None:
        """In the middle of something, in any thread."""
        if self.at_once and self.signum is not None:
            raise Interrupted(self.signum)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            self.at_once = True
            raise Interrupted(signum)
        self.signum = signum
        with contextlib.suppress(OSError):  # who reads that may have died of the same Ctrl-C
            os.write(2, _PATIENCE)  # print could be what was interrupted


@contextmanager
def deferred() -> Iterator[Interrupt]:
    interrupt = Interrupt()
    before = {signum: signal.signal(signum, interrupt._receive) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def raise_at_once() -> None:
    """Outside training nothing is worth waiting for."""

    def receive(signum: int, frame: FrameType | None) -> None:
        raise Interrupted(signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, receive)

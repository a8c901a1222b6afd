"""Ctrl-C, SIGTERM and a closed terminal (SIGHUP): stop where nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """The run was asked to stop; the exit code is 128 + ``signum``."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


_PATIENCE = b"\nstopping at the next place where nothing is lost; a second signal stops at once, back to the last checkpoint\n"


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
        _leave_closed_terminal()
        if self.signum is not None:
            self.at_once = True
            raise Interrupted(signum)
        self.signum = signum
        _write(_PATIENCE)  # print could be what was interrupted


@contextmanager
def deferred() -> Iterator[Interrupt]:
    interrupt = Interrupt()
    before = _handle(interrupt._receive)
    try:
        yield interrupt
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def raise_at_once() -> None:
    """Outside training nothing is worth waiting for."""

    def receive(signum: int, frame: FrameType | None) -> None:
        _leave_closed_terminal()
        raise Interrupted(signum)

    _handle(receive)


def exit_at_once() -> None:
    """While modules are imported, and when the work is over: there is nothing to tidy up, and an exception would not always arrive, because
    what is raised in a destructor or a callback of the interpreter is printed and forgotten."""

    def receive(signum: int, frame: FrameType | None) -> None:
        _write(f"rlinf-vla: interrupted by {signal.Signals(signum).name}\n".encode())
        os._exit(128 + signum)

    _handle(receive)


def _handle(receive: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Returns the handlers until now. Where SIGHUP is ignored, as below ``nohup``, it stays so."""
    wanted = [signum for signum in SIGNALS if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN]
    return {signum: signal.signal(signum, receive) for signum in wanted}


def _write(text: bytes) -> None:
    with contextlib.suppress(OSError):  # who reads that may have died of the same signal
        os.write(2, text)


def _leave_closed_terminal() -> None:
    """What is printed from now on goes nowhere where the terminal is gone: an error of ``print`` must not cost the checkpoint."""
    for output in (1, 2):
        try:
            os.write(output, b"")  # fails on a terminal that has hung up, and does nothing elsewhere
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, output)
            os.close(nowhere)

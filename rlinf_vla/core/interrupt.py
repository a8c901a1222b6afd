"""Handle Ctrl-C, SIGTERM and a closed terminal (SIGHUP) so that no work is lost."""

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
    """A signal asked the run to stop; the exit code is 128 + ``signum``."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


_PATIENCE = b"\nstopping at the next place where nothing is lost; a second signal stops at once, back to the last checkpoint\n"


class Interrupt:
    """Store a signal until the run may stop without loss; a second signal stops it at once."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.at_once = False

    def check(self) -> None:
        """Raise Interrupted if a signal has arrived. Call it where stopping loses nothing."""
        if self.signum is not None:
            raise Interrupted(self.signum)

    def check_at_once(self) -> None:
        """Raise Interrupted if a second signal has arrived. Call it anywhere, from any thread."""
        if self.at_once and self.signum is not None:
            raise Interrupted(self.signum)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        leave_closed_terminal()
        if self.signum is not None:
            self.at_once = True
            raise Interrupted(signum)
        self.signum = signum
        _write(_PATIENCE)  # print is not reentrant, and may be what was interrupted


@contextmanager
def deferred_signals() -> Iterator[Interrupt]:
    """Defer signals to ``Interrupt.check``; restore the previous handlers on exit."""
    interrupt = Interrupt()
    before = _handle(interrupt._receive)
    try:
        yield interrupt
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def raise_at_once() -> None:
    """Raise Interrupted as soon as a signal arrives; used outside training."""

    def receive(signum: int, frame: FrameType | None) -> None:
        leave_closed_terminal()
        raise Interrupted(signum)

    _handle(receive)


def exit_at_once() -> None:
    """End the process as soon as a signal arrives; used during imports and after the work is done.

    Nothing needs cleaning up then, and an exception could be lost: Python prints and drops what is
    raised in a destructor or in a callback of the interpreter.
    """

    def receive(signum: int, frame: FrameType | None) -> None:
        _write(f"rlinf-vla: interrupted by {signal.Signals(signum).name}\n".encode())
        os._exit(128 + signum)

    _handle(receive)


def _handle(receive: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Install ``receive`` and return the previous handlers; keep an ignored SIGHUP (``nohup``)."""
    signals = [
        signum
        for signum in SIGNALS
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN
    ]
    return {signum: signal.signal(signum, receive) for signum in signals}


def _write(text: bytes) -> None:
    with contextlib.suppress(OSError):  # the reader may have died of the same signal
        os.write(2, text)


def leave_closed_terminal() -> None:
    """Redirect output to /dev/null if the terminal is gone: ``print`` must not prevent a save."""
    for output in (1, 2):
        try:
            os.write(
                output, b""
            )  # fails on a terminal that has hung up, and does nothing elsewhere
        except OSError:
            discard(output)


def discard(output: int) -> None:
    """Redirect a file descriptor to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output)
    os.close(nowhere)

"""Supervise Python child processes: start one with a channel, notice its end, count losses.

``python -m`` and ``python -c`` put the current directory first on the import path: ``json.py``
there would replace the standard library's. A child process must therefore not import from there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlinf_vla.core.channel import Channel

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Give up when this many processes in a row are lost at the same work without progress."""

SAFE = {"PYTHONSAFEPATH": "1"}
"""Environment variables of children, inherited by theirs: Python 3.11 and newer then leave the
current directory off the import path."""

_WITHOUT_CURRENT_DIRECTORY = "import sys\nsys.path[:] = [entry for entry in sys.path if entry]\n"
"""The same for ``python -c`` before 3.11; a file cannot replace ``sys``, which is built in."""


def command(program: Sequence[str], python: str | None = None) -> list[str]:
    """Return the command line for ``program``: ``-m MODULE ...``, ``-c CODE ...`` or ``FILE ...``.

    ``python``: interpreter of another environment, maybe older than 3.11; None: this one's. Raises
    ValueError for ``-m`` with another interpreter, which may import from the current directory.
    """
    first, *rest = program
    if python is None:
        return [sys.executable, "-P", *program]
    if first == "-m":
        raise ValueError(f"{program}: in another Python environment run a file")
    if first == "-c":
        return [python, first, _WITHOUT_CURRENT_DIRECTORY + rest[0], *rest[1:]]
    return [python, *program]


def environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a child's environment variables: those of this process, SAFE and ``added``."""
    return {**os.environ, **SAFE, **(added or {})}


@dataclass
class Losses:
    """Count consecutive processes that were lost at the same work without progress."""

    in_a_row: int = 0
    """Losses since the last one that got further than all before."""
    _furthest: float = 0.0

    def give_up(self, reached: float) -> bool:
        """Count one more loss, which had reached ``reached``; return whether to give up."""
        if not self.in_a_row or reached > self._furthest:
            self.in_a_row = 0
            self._furthest = reached
        self.in_a_row += 1
        return self.in_a_row >= ATTEMPTS


class Child:
    """A child process with a channel to it.

    The child ends by itself when the channel closes, however this process ends: it calls
    ``Channel.exit_with_peer``, or stops what it drives first. What it prints goes to an unnamed
    file, of which ``output_tail`` reads the end.
    """

    def __init__(
        self,
        program: Sequence[str],
        *,
        python: str | None = None,
        variables: Mapping[str, str] | None = None,
        files: Sequence[int] = (),
        own_session: bool = True,
    ) -> None:
        """Start ``program`` (see ``command``) with ``Channel.to_parent``'s number as last argument.

        variables: added to this process's environment. files: descriptors that the child inherits.
        own_session: signals of the terminal, such as Ctrl-C, do not reach the child. Raises OSError
        if there is no such interpreter.
        """
        self.channel, theirs = Channel.pair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (unnamed, and open as long as the process)
        self._printed = b""
        self.allowed = 0.0
        self._deadline = float("inf")
        """Seconds given by the last ``allow``, and when they are over."""
        try:
            with theirs:
                self._popen = subprocess.Popen(
                    [*command(program, python), str(theirs.fileno())],
                    pass_fds=(theirs.fileno(), *files),
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                    env=environment(variables),
                    start_new_session=own_session,
                )
        except OSError:
            self.channel.close()
            self._output.close()
            raise
        logger.debug("process %d started: %s", self.pid, " ".join(map(str, program)))

    @property
    def pid(self) -> int:
        return self._popen.pid

    def wait(self, seconds: float) -> int | None:
        """Return its exit code, or None if it still lives after ``seconds``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(seconds)
        return self._popen.returncode

    def allow(self, seconds: float) -> None:
        """Count the process as hung ``seconds`` from now, unless called again before."""
        self.allowed = seconds
        self._deadline = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds until the process counts as hung; 0 if it does."""
        return max(0.0, self._deadline - time.monotonic())

    def end(self, patience: float = 0.2) -> int:
        """Hang up, kill the process if it lives after ``patience`` seconds, return its exit code.

        Idempotent. A process that died by itself keeps its own exit code.
        """
        self.channel.hang_up()
        self.wait(patience)
        self._popen.kill()
        code = self._popen.wait()
        self.channel.close()
        if not self._output.closed:
            self._printed = self._tail()
            self._output.close()
            logger.debug(
                "process %d ended with exit code %d; it printed at the end: %s",
                self.pid,
                code,
                self.output_tail(10) or "nothing",
            )
        return code

    def output_tail(self, lines: int = 1) -> str:
        """Return the last lines that the process printed, without blank ones; "" if none."""
        printed = (self._printed if self._output.closed else self._tail()).decode(errors="replace")
        return "\n".join([line.rstrip() for line in printed.split("\n") if line.strip()][-lines:])

    def _tail(self) -> bytes:
        """Read with ``pread``, because the child shares the file's position."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), 4096, max(0, size - 4096))

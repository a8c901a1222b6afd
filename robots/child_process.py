"""Start a child process with a message channel and report why it died."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rlinf_vla.core import child_process, robot
from rlinf_vla.core.robot import RobotError

from .bootstrap import __file__ as bootstrap
from .channel import Channel, ChannelClosed, Message
from .extra import INSTALL

_NOT_INSTALLED = "ModuleNotFoundError: No module named "


class NotInstalled(RobotError):
    """A package is missing in the Python environment of a child process."""


class ChildProcess:
    """Run ``module`` (relative to this folder) in a child process.

    The child's first argument is the file descriptor of its end of ``channel``. The child exits by
    itself when the channel closes, however this process ends.
    """

    def __init__(self, name: str, module: str, python: str | None = None, environment: Mapping[str, str] | None = None) -> None:
        """Start the process. Raises RobotError if that fails.

        name: used in errors. python: interpreter of another environment; None uses this one's.
        """
        self._name = name
        self.channel, theirs = Channel.pair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (unnamed, and open as long as the process)
        program = child_process.command([bootstrap, str(Path(robot.__file__).parents[1]), module, str(theirs.fileno())], python)
        try:
            with theirs:
                self._popen = subprocess.Popen(
                    program,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                    env=child_process.environment({"OMP_NUM_THREADS": "1", **(environment or {})}),
                    start_new_session=True,  # Ctrl-C reaches this process only
                )
        except OSError as error:
            self.channel.close()
            self._output.close()
            raise RobotError(f"{name} cannot be started with {program[0]}: {error.strerror}") from None

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def begin(self, options: Message) -> None:
        """Send the first message. If the process is already dead, ``wait_ready`` reports why."""
        with contextlib.suppress(ChannelClosed):
            self.channel.send(options)

    def wait_ready(self, deadline: float) -> Message:
        """Return its first message, waiting until ``deadline`` (monotonic).

        Raises RobotError if the message has the key ``error``, or the process dies or stays silent;
        NotInstalled if it died because a package is missing.
        """
        try:
            message = self.channel.receive(max(deadline - time.monotonic(), 1e-3))
        except ChannelClosed:
            raise self._reason() from None
        if message is None:
            self.kill()
            raise RobotError(f"{self._name} was not ready in time")
        if "error" in message:
            self.end(1.0)
            raise RobotError(message["error"])
        return message

    def end(self, timeout: float) -> None:
        """Let it exit by itself; kill it after ``timeout`` seconds. Idempotent."""
        self.channel.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout)
        self.kill()

    def kill(self) -> None:
        self.channel.close()
        self._popen.kill()
        self._popen.wait()
        self._output.close()

    def obituary(self) -> str:
        """Return one line: its exit code and last line of output, or the package it lacks."""
        return str(self._reason())

    def _reason(self) -> RobotError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(0.1)  # its end of the channel closes a moment before it exits
        size = os.fstat(self._output.fileno()).st_size
        lines = os.pread(self._output.fileno(), 4096, max(0, size - 4096)).decode(errors="replace").split("\n")
        words = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        if words.startswith(_NOT_INSTALLED):
            return NotInstalled(f"{self._name} needs {words.removeprefix(_NOT_INSTALLED)}, which is not installed: {INSTALL}")
        return RobotError(f"{self._name} (process {self.pid}) ended with exit code {self._popen.poll()}: {words}")

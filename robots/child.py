"""A process of ours beside this one, which has a channel to it and hears its last words."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rlinf_vla import child_process, robot
from rlinf_vla.robot import RobotError

from .bootstrap import __file__ as bootstrap
from .channel import Channel, ChannelClosed, Message
from .extra import INSTALL

_NOT_INSTALLED = "ModuleNotFoundError: No module named "


class NotInstalled(RobotError):
    """A package is missing where a process of ours runs."""


class Child:
    """``module`` (relative to this folder) in a process of its own, which finds its end of ``channel`` by the number in its first argument.

    It ends, by its own decision, when the channel closes, however this process ends.
    """

    def __init__(self, name: str, module: str, python: str | None = None, environment: Mapping[str, str] | None = None) -> None:
        """name: what errors call it. python: of another Python environment; None takes this one's. Raises RobotError where it cannot be
        started."""
        self._name = name
        self.channel, theirs = Channel.pair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (nameless, and open as long as the process)
        program = child_process.command([bootstrap, str(Path(robot.__file__).parent), module, str(theirs.fileno())], python)
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
        """The first message to it. Where it is dead already, ``wait_ready`` says why."""
        with contextlib.suppress(ChannelClosed):
            self.channel.send(options)

    def wait_ready(self, deadline: float) -> Message:
        """Its first message. Raises RobotError where it says ``error``, dies, or is silent until ``deadline`` (monotonic); NotInstalled
        where it died for want of a package."""
        try:
            message = self.channel.receive(max(deadline - time.monotonic(), 1e-3))
        except ChannelClosed:
            raise self._reason() from None
        if message is None:
            self.kill()
            raise RobotError(f"{self._name} did not get ready in time")
        if "error" in message:
            self.end(1.0)
            raise RobotError(message["error"])
        return message

    def end(self, timeout: float) -> None:
        """Let it end by itself, else kill it after ``timeout`` seconds. Idempotent."""
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
        """One line: that it is dead, how it died, and the last thing that it said; or what it lacks."""
        return str(self._reason())

    def _reason(self) -> RobotError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(0.1)  # its end of the channel closes a moment before
        size = os.fstat(self._output.fileno()).st_size
        lines = os.pread(self._output.fileno(), 4096, max(0, size - 4096)).decode(errors="replace").split("\n")
        words = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        if words.startswith(_NOT_INSTALLED):
            return NotInstalled(f"{self._name} needs {words.removeprefix(_NOT_INSTALLED)}, which is not installed: {INSTALL}")
        return RobotError(f"{self._name} (process {self.pid}) is gone with exit code {self._popen.poll()}: {words}")

"""Start a module of this package in a child process and report why it died; or be that child."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rlinf_vla.core import bootstrap, child_process
from rlinf_vla.core.channel import Channel, ChannelClosed
from rlinf_vla.features.realworld.robot import RobotError

from .extra import INSTALL

ENDING_SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU, signal.SIGALRM),
    *(
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGVTALRM,
        signal.SIGPROF,
        signal.SIGIO,
        signal.SIGPWR,
    ),
)
"""Signals that would end a process and can be caught, so that it stops an arm first."""
_EXIT_S = 5.0
"""A process closes its end of the channel before it has exited, on a busy machine long before."""
_NOT_INSTALLED = "ModuleNotFoundError: No module named "


class NotInstalled(RobotError):
    """A package is missing in the Python environment of a child process."""


class ChildProcess(child_process.Child):
    """Run ``module`` (relative to this folder) in a child process, maybe in another environment."""

    def __init__(
        self,
        name: str,
        module: str,
        python: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process; ``name`` is used in errors. Raises RobotError if that fails."""
        self._name = name
        program = [str(bootstrap.__file__), f"robots.{module}"]
        try:
            super().__init__(
                program, python=python, variables={"OMP_NUM_THREADS": "1", **(variables or {})}
            )
        except OSError as error:
            raise RobotError(
                f"{name} cannot be started with {python or 'python'}: {error.strerror}"
            ) from None

    def begin(self, options: dict[str, Any]) -> None:
        """Send the first message. If the process is already dead, ``wait_ready`` reports why."""
        with contextlib.suppress(ChannelClosed):
            self.channel.send(options)

    def wait_ready(self, deadline: float) -> dict[str, Any]:
        """Return its first message, waiting until ``deadline`` (monotonic).

        Raises RobotError if the message has the key ``error``, or the process dies or stays silent;
        NotInstalled if it died because a package is missing.
        """
        try:
            message = self.channel.receive(max(deadline - time.monotonic(), 1e-3))
        except ChannelClosed:
            raise self.reason() from None
        if message is None:
            self.end(0.0)
            raise RobotError(f"{self._name} was not ready in time")
        if "error" in message:
            self.end(1.0)
            raise RobotError(message["error"])
        return message

    def reason(self) -> RobotError:
        """Return why it ended: exit code and last line of output, or the package that it lacks."""
        code = self.wait(_EXIT_S)
        words = self.output_tail() or "no output"
        if words.startswith(_NOT_INSTALLED):
            return NotInstalled(
                f"{self._name} needs {words.removeprefix(_NOT_INSTALLED)}, which is not installed: {INSTALL}"
            )
        return RobotError(f"{self._name} (process {self.pid}) ended with exit code {code}: {words}")


class Service(Protocol):
    def run(self, owner: Channel) -> None:
        """Run until ``owner``, the starting process, closes the channel."""

    def close(self) -> None: ...


def serve(make: Callable[[dict[str, Any]], Service]) -> None:
    """In the child process: run what ``make`` returns for the options that ``begin`` sent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner = Channel.to_parent()
    service = make(owner.wait())
    owner.send({"ready": True})
    try:
        service.run(owner)
    finally:
        service.close()

"""One simulator process: how it starts, the messages to it, and its losses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.channel import ChannelClosed
from rlinf_vla.core.child_process import Child, Losses

from .shared_arrays import SharedArrays


class SimulatorError(RuntimeError):
    """An exception of a simulator, with its traceback as the message."""

    def __init__(self, pid: int, answer: dict[str, Any]) -> None:
        message = answer["error"]
        super().__init__(f"simulator process {pid} failed: {message.splitlines()[-1]}\n{message}")
        self.slots: list[int] = answer["slots"]


class SimulatorProcess:
    """One simulator process: how it starts, the slots it owns and its command in flight."""

    def __init__(self, start: Callable[[], Child], message: dict[str, Any], slots: range) -> None:
        """``message``: the first one to a process, to which its slots are added."""
        self.slots = slots
        self.command: dict[str, Any] | None = None
        self.losses = Losses()
        """Losses since a command was last completed."""
        self._start = start
        self._message = message | {"first": slots.start, "slots": len(slots)}

    def launch(self, timeout: float) -> None:
        """Start the process. It must get ready within ``timeout`` seconds, in the background."""
        self.child = self._start()
        self.started = self.ready = False
        self.send(self._message, timeout)

    def reached(self, arrays: SharedArrays | None) -> int:
        """Return how far this process got.

        Grows with each control step executed or replayed, in the same order for every replacement.
        """
        return int(self.started) + (0 if arrays is None else int(arrays.reached[self.slots].sum()))

    def send(self, message: dict[str, Any], timeout: float) -> None:
        """Send a message whose answer is due in ``timeout`` seconds.

        Does not report a lost process; ``receive`` does.
        """
        self.child.allow(timeout)
        with contextlib.suppress(ChannelClosed, BlockingIOError):
            self.child.channel.send(message, timeout)

    def receive(self) -> dict[str, Any]:
        answer = self.child.channel.receive(self.child.remaining)
        if answer is None:
            raise TimeoutError
        if "unusable" in answer:
            raise UserError(answer["unusable"])
        if "error" in answer:
            raise SimulatorError(self.child.pid, answer)
        return answer

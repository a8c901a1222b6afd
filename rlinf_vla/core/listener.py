"""Take messages at a path, from whichever process sends them: orders to a robot and its cameras.

Uses only the standard library, as ``channel.py``.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

from rlinf_vla.core.channel import Channel, ChannelClosed


class Listener:
    """Accept connections at a path; a loop polls it and never waits for the callers."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(path))
        self._socket.listen(8)
        self._socket.setblocking(False)
        self._callers: list[Channel] = []

    def messages(self) -> list[tuple[Channel, dict[str, Any]]]:
        """Return the messages received since the last call, each with its caller."""
        with contextlib.suppress(BlockingIOError):
            self._callers.append(Channel(self._socket.accept()[0]))
        heard = []
        for caller in list(self._callers):
            try:
                message = caller.receive(0)
                if message is not None:
                    heard.append((caller, message))
            except (ChannelClosed, ValueError):
                caller.close()
                self._callers.remove(caller)
        return heard

    def close(self) -> None:
        for caller in self._callers:
            caller.close()
        self._socket.close()
        self._path.unlink(missing_ok=True)


def ask(path: Path, message: dict[str, Any], timeout: float) -> dict[str, Any] | None:
    """Send one message to the Listener at ``path`` and return its answer, or None if there is none.

    Raises TimeoutError if the message was delivered but not answered within ``timeout`` seconds.
    """
    try:
        channel = Channel.dial(path)
    except OSError:
        return None
    try:
        channel.send(message)
        if (answer := channel.receive(timeout)) is None:
            raise TimeoutError(f"no answer within {timeout:g} s")
        return answer
    except (ChannelClosed, BlockingIOError):
        return None
    finally:
        channel.close()

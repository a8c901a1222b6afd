"""Exchange JSON messages between local processes over Unix SOCK_SEQPACKET sockets; no pickle."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

_LARGEST = 1 << 16
"""Maximum size of a message, bytes."""

Message = dict[str, Any]


class ChannelClosed(Exception):
    """The other side has closed the channel or died."""


class Channel:
    """One end of a connection to another process."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Return our end, and the socket to pass to a child process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    @classmethod
    def dial(cls, path: Path) -> Channel:
        """Connect to the Listener at ``path``. Raises OSError if there is none."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(str(path))
        except OSError:
            sock.close()
            raise
        return cls(sock)

    def send(self, message: Message) -> None:
        """Send without waiting. Raises ChannelClosed, or BlockingIOError if the buffer is full."""
        try:
            self._socket.send(json.dumps(message).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise
        except OSError as error:
            raise ChannelClosed from error

    def receive(self, timeout: float) -> Message | None:
        """Return the next message, or None after ``timeout`` seconds; 0 does not wait.

        Raises ChannelClosed, or ValueError if the data is not a JSON object.
        """
        self._socket.settimeout(timeout)
        try:
            data = self._socket.recv(_LARGEST)
        except (BlockingIOError, TimeoutError):
            return None
        except OSError as error:
            raise ChannelClosed from error
        if not data:
            raise ChannelClosed
        message: Message = json.loads(data)
        if not isinstance(message, dict):
            raise ValueError("the message is not a JSON object")
        return message

    def hang_up(self) -> None:
        """Stop sending; the other side reads all that was sent and then sees the end.

        Closing the socket while it holds unread data would instead make Linux discard what the
        other side has not read yet (ECONNRESET).
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


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

    def messages(self) -> list[tuple[Channel, Message]]:
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


def ask(path: Path, message: Message, timeout: float) -> Message | None:
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

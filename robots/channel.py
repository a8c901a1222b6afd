"""JSON objects between processes of one machine, over sockets that keep each message whole (unix, SOCK_SEQPACKET). Never pickle."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

_LARGEST = 1 << 16
"""Bytes of one message."""

Message = dict[str, Any]


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Ours, and what a child gets."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    @classmethod
    def dial(cls, path: Path) -> Channel:
        """Raises OSError where nobody listens."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(str(path))
        except OSError:
            sock.close()
            raise
        return cls(sock)

    def send(self, message: Message) -> None:
        """Never waits. Raises ChannelClosed, or BlockingIOError where the other side has not read for long."""
        try:
            self._socket.send(json.dumps(message).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise
        except OSError as error:
            raise ChannelClosed from error

    def receive(self, timeout: float) -> Message | None:
        """The next message; None after ``timeout`` seconds, of which 0 does not wait. Raises ChannelClosed, and ValueError for what is
        none."""
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
            raise ValueError("no object")
        return message

    def hang_up(self) -> None:
        """Nothing more is sent. The other side reads what was, and then that we are gone: were the socket closed while something that it
        sent has not been read here, Linux would take from it what it has not read (ECONNRESET)."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


class Listener:
    """Takes calls of other processes at a path of the file system; looked after by a loop, which never waits for them."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(path))
        self._socket.listen(8)
        self._socket.setblocking(False)
        self._callers: list[Channel] = []

    def messages(self) -> list[tuple[Channel, Message]]:
        """Who said what since the last look."""
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
    """One question to a Listener; None where nobody listens there. Raises TimeoutError where it was delivered, and not answered."""
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

"""Exchange JSON messages between processes of one machine over Unix SOCK_SEQPACKET sockets.

Uses only the standard library, and never pickle: simulators and drivers import it in Python
environments of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any

PACKET = 1 << 16
"""Bytes of a full packet. All packets of a message but the last are full, and the last is not."""
LARGEST = 1 << 26
"""Default of the maximum size of a message, bytes."""


class ChannelClosed(Exception):
    """The other side has closed the channel or died."""


class Channel:
    """One end of a connection to another process. One thread may send while another receives."""

    def __init__(self, sock: socket.socket, largest: int = LARGEST) -> None:
        """``largest``: messages that do not fit into so many bytes are refused."""
        self._socket = sock
        self._largest = largest
        self._begun = b""
        """The packets that have arrived of an incomplete message."""

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Return our end, and the socket to pass to a child process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    @classmethod
    def to_parent(cls) -> Channel:
        """Return the end that ``child_process.Child`` passed to this process."""
        return cls(socket.socket(fileno=int(sys.argv[-1])))

    @classmethod
    def dial(cls, path: Path | str, timeout: float | None = None) -> Channel:
        """Connect to the ``Listener`` at ``path``, or at an abstract address (``unix(7)``).

        Raises OSError if there is none; TimeoutError if it accepts nobody for ``timeout`` seconds.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # Python's own timeout would not wait: the system refuses at once if others wait already
            sock.setsockopt(
                socket.SOL_SOCKET,
                socket.SO_SNDTIMEO,
                struct.pack("@ll", *divmod(round(1e6 * (timeout or 0.0)), 1_000_000)),
            )
            sock.connect(str(path))
        except BlockingIOError:
            sock.close()
            raise TimeoutError from None
        except OSError:
            sock.close()
            raise
        return cls(sock)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def of_this_user(self) -> bool:
        """Whether the other side is a process of this user, or of root."""
        _, user, _ = struct.unpack(
            "3i",
            self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")),
        )
        return user in (os.getuid(), 0)

    def send(self, message: dict[str, Any], timeout: float | None = 0.0) -> None:
        """Send; wait at most ``timeout`` seconds for room in the buffer, None: without a limit.

        Raises ChannelClosed, or BlockingIOError if there is no room. A message of more than one
        packet needs a timeout: the channel closes if only its beginning could be sent.
        """
        data = json.dumps(message).encode()
        if len(data) % PACKET == 0:
            data += b" "
        for begin in range(0, len(data), PACKET):
            while True:
                try:
                    self._socket.send(
                        data[begin : begin + PACKET], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
                    )
                    break
                except BlockingIOError:
                    if self._ready(select.POLLOUT, timeout):
                        continue
                    if begin:
                        self.hang_up()
                    raise
                except OSError as error:
                    raise ChannelClosed from error

    def receive(self, timeout: float | None) -> dict[str, Any] | None:
        """Return the next message, or None after ``timeout`` seconds without a packet.

        0 does not wait, None waits for ever. Raises ChannelClosed, or ValueError if the data is not
        a JSON object, too long or too deep.
        """
        while True:
            try:
                data = self._socket.recv(PACKET, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if not self._ready(select.POLLIN, timeout):
                    return None
                continue
            except OSError as error:
                raise ChannelClosed from error
            if not data:
                raise ChannelClosed
            if len(data) == PACKET:
                self._begun += data
                if len(self._begun) >= self._largest:
                    raise ValueError("the message is too long")
                continue
            data = self._begun + data
            self._begun = b""
            try:
                message: dict[str, Any] = json.loads(data)
            except RecursionError:
                raise ValueError("the message is nested too deeply") from None
            if not isinstance(message, dict):
                raise ValueError("the message is not a JSON object")
            return message

    def wait(self) -> dict[str, Any]:
        """Wait for the next message. Raises ChannelClosed."""
        message = self.receive(None)
        assert message is not None
        return message

    def hang_up(self) -> None:
        """Stop sending; the other side reads all that was sent and then sees the end.

        Closing the socket while it holds unread data would instead make Linux discard what the
        other side has not read yet (ECONNRESET).
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def exit_with_peer(self) -> None:
        """End this process as soon as the other side closes, whatever the main thread is doing."""

        def watch() -> None:
            peer = select.poll()
            peer.register(self._socket, select.POLLRDHUP)
            peer.poll()
            os._exit(0)

        threading.Thread(target=watch, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _ready(self, event: int, timeout: float | None) -> bool:
        if timeout == 0:
            return False
        watch = select.poll()
        watch.register(self._socket, event)
        return bool(watch.poll(None if timeout is None else 1e3 * timeout))

"""Take messages at a path, from whichever process sends them: orders to a robot and its cameras.

Uses only the standard library, as ``channel.py``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from pathlib import Path
from typing import Any

from rlinf_vla.core.channel import PACKET, Channel, ChannelClosed

CALLERS = 16
"""Number of connections that are kept; above it, the oldest ones are closed."""
IDLE_S = 10.0
"""A connection without a message for so long is closed."""


class Listener:
    """Accept connections at a path; a loop polls it and never waits for the callers.

    Callers may be careless or hostile: memory, file descriptors and the time of a poll are bounded.
    A message must fit into one packet. A new caller is heard however many others are connected.
    """

    def __init__(self, path: Path, abstract: socket.socket | None = None) -> None:
        """``abstract``: a socket bound to an abstract address, which also takes messages.

        Such an address has no file that could be deleted, and no permissions: only processes of
        this user and of root are heard. Raises OSError.
        """
        self._path = path
        self._abstract = abstract
        self._callers: dict[Channel, float] = {}
        """Time of the last message, or of the connection; oldest connection first."""
        self._socket = self._bound()
        if abstract is not None:
            _listen(abstract)

    def _bound(self) -> socket.socket:
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(self._path))
        _listen(listener)
        self._file = self._path.stat()
        return listener

    @property
    def intact(self) -> bool:
        """Whether the path still leads here: its file was neither deleted nor replaced."""
        try:
            return os.path.samestat(self._path.stat(), self._file)
        except OSError:
            return False

    def restore(self) -> None:
        """Take messages at the path again. Raises OSError."""
        before = self._socket
        self._socket = self._bound()
        before.close()

    def messages(self) -> list[tuple[Channel, dict[str, Any]]]:
        """Return the messages received since the last call, at most one of each caller.

        Answer them before the next call, which may close the oldest connections.
        """
        now = time.monotonic()
        for number, (caller, last) in enumerate(
            list(self._callers.items()), 1 - len(self._callers)
        ):
            if number <= -CALLERS or now - last > IDLE_S:
                self._hang_up(caller)
        self._accept(now)
        heard = []
        for caller in list(self._callers):
            try:
                message = caller.receive(0)
            except (ChannelClosed, ValueError):
                self._hang_up(caller)
                continue
            if message is not None:
                self._callers[caller] = now
                heard.append((caller, message))
        return heard

    def _accept(self, now: float) -> None:
        for listening in filter(None, (self._socket, self._abstract)):
            for _ in range(CALLERS):
                try:
                    caller = Channel(listening.accept()[0], PACKET)
                except OSError as error:  # usually because nobody else waits
                    if error.errno in (errno.EMFILE, errno.ENFILE) and self._callers:
                        self._hang_up(next(iter(self._callers)))
                    break
                if listening is self._socket or caller.of_this_user:
                    self._callers[caller] = now
                else:
                    caller.close()

    def _hang_up(self, caller: Channel) -> None:
        del self._callers[caller]
        caller.close()

    def close(self) -> None:
        for caller in self._callers:
            caller.close()
        for listening in filter(None, (self._socket, self._abstract)):
            listening.close()
        with contextlib.suppress(OSError):  # its folder may have been deleted or replaced
            self._path.unlink(missing_ok=True)


def _listen(bound: socket.socket) -> None:
    bound.listen(CALLERS)
    bound.setblocking(False)


def ask(path: Path | str, message: dict[str, Any], timeout: float) -> dict[str, Any] | None:
    """Send one message to the Listener at ``path`` and return its answer, or None if there is none.

    At an abstract address (``path`` is text) only a process of this user or of root is asked.
    Raises TimeoutError if there is a process, but no answer within ``timeout`` seconds.
    """
    try:
        channel = Channel.dial(path, timeout)
    except TimeoutError:
        raise TimeoutError(f"no answer within {timeout:g} s") from None
    except OSError:
        return None
    try:
        if isinstance(path, str) and not channel.of_this_user:
            return None
        channel.send(message)
        if (answer := channel.receive(timeout)) is None:
            raise TimeoutError(f"no answer within {timeout:g} s")
        return answer
    except (ChannelClosed, BlockingIOError):
        return None
    finally:
        channel.close()

"""Connections to a policy server: messages there and back, within a time, with bounded retries."""

from __future__ import annotations

import os
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import Failure, UserError, printable
from rlinf_vla.config.policy_server import ServerAddress
from rlinf_vla.features.serving.array_messages import INSTALL, LIMITS, MessageError, pack, unpack

SHOWN = 300
"""Characters of a server's message that are repeated to the user."""
CLOSING_S = 1.0
"""Seconds to wait for the server's reason after its error."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
"""Pauses before further attempts double from the first to the longest."""
CONTROL_S = 5.0
"""In a control loop, seconds to connect, and to answer on a connection that has answered before.

The arm has stopped long ago. The first answer may take longer: a server may compile for it."""
DENIED = (401, 403)
"""HTTP statuses for a wrong token."""
TOO_BIG, TRY_AGAIN_LATER = 1009, 1013
"""Codes with which a server closes a connection."""


class Lost(Exception):
    """No connection, or no answer in time: another attempt may succeed. In one line."""


def shown(text: str) -> str:
    """Return the last line of a server's text, which in a traceback is the error, made safe."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["-"]
    return printable(lines[-1][:SHOWN])


class Connection:
    """One WebSocket to the server, whose first message is its metadata."""

    def __init__(self, server: ServerAddress, connect_s: float | None = None) -> None:
        """Connect, within ``connect_s`` (default: as for an answer), and read the metadata.

        Raises Lost, Failure and UserError.
        """
        client = _client()
        self.url = server.address
        self._node = server.node
        self._timeout = server.timeout_s
        self._deadline = time.monotonic() + self._timeout
        self._sent = 0
        self._limited = False
        settings: dict[str, Any] = {
            "ssl": _trust(server),
            "additional_headers": _token(server),
            "close_timeout": 1,
        }
        settings |= {
            "open_timeout": self._timeout if connect_s is None else min(connect_s, self._timeout)
        }
        settings |= {"ping_interval": None}  # a server may infer on the thread that would answer
        settings |= {"compression": None, "max_size": LIMITS.size, "proxy": None}
        self._opened = ExitStack()
        try:
            self._socket = self._opened.enter_context(client.connect(self.url, **settings))
        except Exception as error:
            raise _refused(self.url, self._node, error) from None
        self._limit_sending()
        try:
            metadata = self.receive()
            if not isinstance(metadata, dict):
                raise Failure(
                    f"{self.url} does not begin with metadata, as a policy server does: check the path of {self._node}.url"
                )
            self.metadata: dict[str, Any] = metadata
        except BaseException:
            self.close()
            raise

    def limit(self, seconds: float) -> None:
        """Wait at most ``seconds`` for later answers, if that is less than before."""
        if seconds < self._timeout:
            self._timeout = seconds
            self._limited = True
            self._limit_sending()

    def _limit_sending(self) -> None:
        # the library waits without limit for a server that reads nothing
        whole = int(self._timeout)
        limit = struct.pack("ll", whole, int((self._timeout - whole) * 1e6))
        self._socket.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, message: Any) -> None:
        """Send a message; its answer is due within the limit. Raises Lost and Failure."""
        self._deadline = time.monotonic() + self._timeout
        data = pack(message)
        self._sent = len(data)
        try:
            self._socket.send(data)
        except Exception as error:
            raise self._lost(error) from None

    def receive(self) -> Any:
        """Return the next message. Raises Lost, and Failure for what is no answer."""
        try:
            data = self._socket.recv(timeout=max(0.0, self._deadline - time.monotonic()))
        except Exception as error:
            raise self._lost(error) from None
        if isinstance(data, str):
            raise self._refused(data)
        try:
            return unpack(data)
        except MessageError as error:
            raise Failure(
                f"the policy server {self.url} sends what cannot be read: {error}"
            ) from None

    @property
    def is_open(self) -> bool:
        """False once the server closed it, for instance because nothing was asked for long."""
        from websockets.protocol import State

        return bool(self._socket.protocol.state is State.OPEN)

    def close(self) -> None:
        self._opened.close()

    def _refused(self, text: str) -> Exception:
        """Return what to raise for a text instead of an answer; the server then closes."""
        from websockets.exceptions import ConnectionClosed

        try:
            self._socket.recv(timeout=CLOSING_S)
        except ConnectionClosed as error:
            if error.rcvd is not None and error.rcvd.code == TRY_AGAIN_LATER:
                return Lost(shown(text))
        except TimeoutError:  # it leaves the connection open
            pass
        return Failure(f"the policy server {self.url} refuses: {shown(text)}")

    def _lost(self, error: Exception) -> Exception:
        from websockets.exceptions import ConnectionClosed

        if isinstance(error, TimeoutError):
            key = "" if self._limited else f" ({self._node}.timeout_s)"
            return Lost(f"no answer within {self._timeout:g} s{key}")
        if isinstance(error, ConnectionClosed):
            if error.rcvd is not None and error.rcvd.code == TOO_BIG:
                return Failure(
                    f"the policy server {self.url} takes no message of {self._sent} bytes: lower rollout.batch_size"
                )
            return Lost(
                f"the connection was closed{f': {shown(error.rcvd.reason)}' if error.rcvd and error.rcvd.reason else ''}"
            )
        return Lost(f"the connection failed: {shown(str(error) or type(error).__name__)}")


class Connections:
    """Up to ``count`` connections to a server, which is ``known`` by its metadata."""

    def __init__(
        self,
        server: ServerAddress,
        count: int,
        known: Callable[[dict[str, Any]], bool] = lambda metadata: True,
    ) -> None:
        self.server = server
        self.count = count
        self.retries = server.retries
        self._known = known
        self._limit: float | None = None
        """In a control loop, seconds to connect, and to answer again."""
        self._open: list[Connection] = []

    def begin_control(self) -> None:
        """Make one attempt for each request, and notice soon that the server is silent."""
        self.retries = 0
        self._limit = CONTROL_S

    def ask(
        self, requests: Sequence[Any], sleep: Callable[[float], None] = time.sleep
    ) -> list[Any]:
        """Return the answers to ``requests``, in order; ``count`` of them are under way at a time.

        Raises Failure if the last attempt failed, or an answer is none.
        """
        answers: list[Any] = []
        for attempt in range(self.retries + 1):
            try:
                while len(answers) < len(requests):
                    answers += self._ask(requests[len(answers) : len(answers) + self.count])
                return answers
            except Lost as error:
                self.close()
                lost = error
            except BaseException:
                self.close()  # an answer may still be under way, and would be taken for the next
                raise
            if attempt < self.retries:
                sleep(min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S))
        attempts = f" in {self.retries + 1} attempts" if self.retries else ""
        raise Failure(f"the policy server {self.server.address} does not answer{attempts}: {lost}")

    def _ask(self, requests: Sequence[Any]) -> list[Any]:
        self._open = [connection for connection in self._open if connection.is_open]
        while len(self._open) < len(requests):
            self._open.append(self._connect())
        for connection, request in zip(self._open, requests, strict=False):
            connection.send(request)
        answers = [
            connection.receive() for connection, _ in zip(self._open, requests, strict=False)
        ]
        if self._limit is not None:
            for connection in self._open:
                connection.limit(self._limit)
        return answers

    def _connect(self) -> Connection:
        try:
            connection = Connection(self.server, self._limit)
        except UserError as error:  # the server accepted the same options at the beginning
            raise Failure(str(error)) from None
        if not self._known(connection.metadata):
            connection.close()
            raise Failure(
                f"{connection.url} now serves another policy than at the beginning: start again"
            )
        return connection

    def close(self) -> None:
        """Close all connections; the next request opens new ones."""
        while self._open:
            self._open.pop().close()


def metadata_of(server: ServerAddress) -> dict[str, Any]:
    """Return what the server says of itself, over a connection of its own. Raises UserError."""
    try:
        connection = Connection(server)
    except (Lost, Failure) as error:
        raise UserError(
            f"{server.node}.url={server.url}: {error}: start the server first, and check address and dialect"
        ) from None
    connection.close()
    return connection.metadata


def _token(server: ServerAddress) -> dict[str, str]:
    if server.token_env is None:
        return {}
    token = os.environ.get(server.token_env, "")
    if not token or not token.isascii() or not token.isprintable():
        raise UserError(
            f"{server.node}.token_env={server.token_env}: set this environment variable to the server's token"
        )
    return {"Authorization": f"Bearer {token}"}


def _trust(server: ServerAddress) -> ssl.SSLContext | None:
    if not server.address.startswith("wss:"):
        if server.ca_file is not None:
            raise UserError(
                f"{server.node}.ca_file={server.ca_file} is for wss://, {server.node}.url is {server.url}: change one"
            )
        return None
    try:
        path = None if server.ca_file is None else str(Path(server.ca_file).expanduser())
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # SSLError is one
        raise UserError(
            f"{server.node}.ca_file={server.ca_file} cannot be read as PEM certificates ({error.strerror or error})"
        ) from None


def _refused(url: str, node: str, error: Exception) -> Exception:
    """Return what to raise because ``url`` could not be connected to."""
    from websockets.exceptions import InvalidStatus, InvalidURI

    if isinstance(error, InvalidURI):
        return UserError(f"{node}.url={url} is no address: give ws://HOST:PORT")
    if isinstance(error, ssl.SSLCertVerificationError):
        return UserError(
            f"{url} has no certificate to trust ({shown(error.verify_message)}): give its own as {node}.ca_file"
        )
    if isinstance(error, InvalidStatus):
        status = error.response.status_code
        if status in DENIED:
            return UserError(
                f"{url} wants a token, or another one: put it into a variable and name that in {node}.token_env"
            )
        return Lost(f"{url} answers HTTP {status} instead of opening a WebSocket")
    if isinstance(error, TimeoutError):
        return Lost(f"{url} accepts no connection in time ({node}.timeout_s)")
    return Lost(f"{url} cannot be connected to ({shown(str(error) or type(error).__name__)})")


def _client() -> Any:
    try:
        from websockets.sync import client
    except ImportError:
        raise UserError(f"a policy on a server needs websockets: {INSTALL}") from None
    return client

"""Stand-in policy servers: openpi's wire written from its description, without our codec."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from tests.skips import missing

if not missing("serve"):
    import msgpack
    from websockets.sync.server import ServerConnection, serve

Answer = Callable[[dict[str, Any]], Any]


def packed(message: Any) -> bytes:
    """As openpi's ``msgpack_numpy.packb``."""

    def encoded(value: Any) -> Any:
        assert isinstance(value, np.ndarray) and value.dtype.kind not in "VOc"
        return {
            b"__ndarray__": True,
            b"data": value.tobytes(),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }

    return msgpack.packb(message, default=encoded)


def unpacked(data: bytes) -> Any:
    """As openpi's ``msgpack_numpy.unpackb``."""

    def decoded(fields: dict[Any, Any]) -> Any:
        if b"__ndarray__" in fields:
            return np.ndarray(
                buffer=fields[b"data"], dtype=np.dtype(fields[b"dtype"]), shape=fields[b"shape"]
            )
        return fields

    return msgpack.unpackb(data, object_hook=decoded)


class PolicyServer:
    """Counts what arrives. ``answer``: an observation's reply: bytes or text are sent as they are."""

    def __init__(self, answer: Answer, metadata: Any = None, closing: int = 1011) -> None:
        self.closing = closing
        self.answer = answer
        self.metadata = {} if metadata is None else metadata
        self.seen: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.paths: list[str] = []
        self.connections = 0
        self._lock = threading.Lock()

    def __call__(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        with self._lock:
            self.connections += 1
            self.headers.append(connection.request.headers)
            self.paths.append(connection.request.path)
        connection.send(
            self.metadata if isinstance(self.metadata, bytes | str) else packed(self.metadata)
        )
        for data in connection:
            assert isinstance(data, bytes)
            observation = unpacked(data)
            with self._lock:
                self.seen.append(observation)
            reply = self.answer(observation)
            if reply is None:
                return
            connection.send(reply if isinstance(reply, bytes | str) else packed(reply))
            if isinstance(reply, str):  # a traceback, as openpi's server sends it
                connection.close(
                    self.closing, "Internal server error. Traceback included in previous frame."
                )


@contextmanager
def serving(server: PolicyServer, **settings: Any) -> Iterator[str]:
    """Yields the address of ``server``."""
    with serve(
        server, "127.0.0.1", 0, **{"compression": None, "max_size": None} | settings
    ) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        scheme = "wss" if "ssl" in settings else "ws"
        try:
            yield f"{scheme}://127.0.0.1:{listener.socket.getsockname()[1]}"
        finally:
            listener.shutdown()
            thread.join()


@contextmanager
def deaf(metadata: Any) -> Iterator[str]:
    """Yields the address of a server that says its metadata, and reads nothing more."""
    from websockets.server import ServerProtocol

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        held: list[socket.socket] = []

        def accept() -> None:
            with suppress(OSError):  # the listener is shut down
                while True:
                    connection, _ = listener.accept()
                    held.append(connection)
                    protocol = ServerProtocol()
                    protocol.receive_data(connection.recv(4096))
                    (request,) = protocol.events_received()
                    protocol.send_response(protocol.accept(request))
                    protocol.send_binary(packed(metadata))
                    connection.sendall(b"".join(protocol.data_to_send()))

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in held:
                connection.close()

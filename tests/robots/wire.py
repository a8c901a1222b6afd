"""A network between two programs that falls silent without closing, or leads to another server."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Wire:
    """Relays a port of this machine to another. While it is cut, bytes and connections wait, as TCP's do."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._whole = threading.Event()
        self._whole.set()
        self._opened: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def lead_to(self, target: int) -> None:
        """Connections end, and new ones lead to this port, where another server listens."""
        self._target = target
        self._hang_up()

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._listening.close()
        self._whole.set()
        self._hang_up()

    def _hang_up(self) -> None:
        while self._opened:
            each = self._opened.pop()
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        self._whole.wait()
        try:
            server = socket.create_connection(("127.0.0.1", self._target))
        except OSError:  # nobody listens
            client.close()
            return
        self._opened += [client, server]
        back = threading.Thread(target=self._pass_on, args=(server, client), daemon=True)
        back.start()
        self._pass_on(client, server)
        back.join()
        client.close()
        server.close()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        data = b" "
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            self._whole.wait()
            with suppress(OSError):
                target.sendall(data) if data else target.shutdown(socket.SHUT_WR)

"""A TCP relay that delays what a server answers: a slow network on one machine."""

from __future__ import annotations

import queue
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

RESEND_S = 0.2
"""Seconds after which TCP sends a lost packet again: its least timeout on Linux."""
_PIECE = 1 << 16


@dataclass(frozen=True)
class Link:
    """Delays of a relay. ``delay_s``: added to each round trip. ``jitter_s``: standard deviation of
    it. ``loss``: probability that an answer is lost, and sent again after RESEND_S."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    seed: int = 0


@contextmanager
def relay(port: int, link: Link) -> Iterator[int]:
    """Relay a port of this machine to the server at ``port`` of it; yield the relay's port."""
    opened = list[socket.socket]()

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listening.accept()
                server = socket.create_connection(("127.0.0.1", port))
                opened.extend((client, server))
                threading.Thread(target=_pass_on, args=(client, server), daemon=True).start()
                threading.Thread(target=_delay, args=(server, client, link), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield int(listening.getsockname()[1])
        finally:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # ends accept()
            for connection in opened:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(_PIECE):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def _delay(source: socket.socket, target: socket.socket, link: Link) -> None:
    """Pass on each piece after its own delay, in order, as TCP does."""
    pieces: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def send() -> None:
        with suppress(OSError):
            while True:
                due, data = pieces.get()
                time.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)

    threading.Thread(target=send, daemon=True).start()
    draw = random.Random(link.seed)  # noqa: S311  (no secret)
    due = 0.0
    data = b" "
    while data:
        try:
            data = source.recv(_PIECE)
        except OSError:
            data = b""
        wait = max(0.0, draw.gauss(link.delay_s, link.jitter_s)) + RESEND_S * (
            draw.random() < link.loss
        )
        due = max(due, time.monotonic() + wait)
        pieces.put((due, data))

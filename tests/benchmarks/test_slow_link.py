from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from rlinf_vla.benchmarks.slow_link import RESEND_S, Link, relay


@pytest.fixture
def echo() -> Iterator[int]:
    """Port of a server that sends back what it gets."""

    def serve() -> None:
        client, _ = listening.accept()
        with client:
            while data := client.recv(1 << 16):
                client.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = threading.Thread(target=serve)
        serving.start()
        yield int(listening.getsockname()[1])
        serving.join()


@pytest.mark.parametrize(
    ("link", "least"), [(Link(), 0.0), (Link(delay_s=0.15), 0.15), (Link(loss=1.0), RESEND_S)]
)
def test_answers_are_whole_in_order_and_late(echo: int, link: Link, least: float) -> None:
    with relay(echo, link) as port, socket.create_connection(("127.0.0.1", port)) as client:
        for number in range(3):
            message = bytes([number]) * (1 + 70_000 * number)
            began = time.monotonic()
            client.sendall(message)
            found = b""
            while len(found) < len(message):
                found += client.recv(1 << 16)
            assert found == message
            assert time.monotonic() - began >= least


def test_the_end_is_passed_on(echo: int) -> None:
    with relay(echo, Link(delay_s=0.01)) as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"last")
            client.shutdown(socket.SHUT_WR)
            found = b""
            while data := client.recv(100):
                found += data
        assert found == b"last"

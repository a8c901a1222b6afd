"""Messages that a policy server must refuse, for ``attack_server.py``."""

from __future__ import annotations

import json
import random
import socket
import struct
import zlib
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from rlinf_vla.features.serving.array_messages import json_pack, pack

UPGRADE = (
    "GET {path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def observation(size: int = 64) -> dict[str, Any]:
    """A good native observation."""
    image = np.arange(size * size * 3).reshape(size, size, 3).astype(np.uint8)
    return {
        "images": {"base": image},
        "instruction": "push the cube",
        "state": np.zeros(8, np.float32),
    }


def frame(data: bytes, first: int = 0x82, length: int | None = None) -> bytes:
    """A masked websocket frame; ``length``: declared, if not the true one."""
    size = len(data) if length is None else length
    head = (
        bytes([0x80 | size])
        if size < 126
        else b"\xfe" + struct.pack(">H", size)
        if size < 1 << 16
        else b"\xff" + struct.pack(">Q", size)
    )
    return bytes([first]) + head + bytes(4) + data


def array(**changes: Any) -> dict[str, Any]:
    return {"__ndarray__": True, "data": bytes(8), "dtype": "<f4", "shape": [2]} | changes


def bomb(width: int, height: int, shape: list[int]) -> dict[str, Any]:
    """A PNG of a few hundred bytes that would decode to ``width`` x ``height`` pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(100_000), 9))
        + chunk(b"IEND", b"")
    )
    return {"__image__": True, "format": "png", "data": data, "shape": shape}


GOOD = pack(observation())
FRAMES: dict[str, Callable[[random.Random], bytes]] = {
    "truncated": lambda draw: GOOD[: draw.randrange(len(GOOD))],
    "random bytes": lambda draw: draw.randbytes(draw.randrange(400)),
    "changed bytes": lambda draw: changed(GOOD, draw),
    "object dtype": lambda draw: msgpack.packb(
        {
            "images": {
                "base": array(
                    dtype=draw.choice(["|O", "O", "object", "|V8", "<U2", "<M8[s]", "<c8"])
                )
            }
        }
    ),
    "negative or huge shape": lambda draw: msgpack.packb(
        {
            "images": {
                "base": array(
                    shape=draw.choice([[-1], [-1, -2], [2**62, 0], [2**40], [True, 2], [2.0]])
                )
            }
        }
    ),
    "wrong length": lambda draw: msgpack.packb(
        {"images": {"base": array(data=bytes(draw.randrange(200)), dtype="|u1", shape=[64, 64, 3])}}
    ),
    "image bomb": lambda draw: msgpack.packb(
        {
            "images": {
                "base": draw.choice(
                    [bomb(60_000, 60_000, [60_000, 60_000, 3]), bomb(60_000, 60_000, [8, 8, 3])]
                )
            }
        }
    ),
    "deep": lambda draw: b"\x91" * draw.choice([20, 600, 100_000]) + b"\x90",
    "lists of lists": lambda draw: b"\xdd" + struct.pack(">I", 60_000) + b"\x90" * 60_000,
    "declared sizes": lambda draw: draw.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6"]) + b"\xff" * 4,
    "many arrays": lambda draw: msgpack.packb(
        {"images": {str(number): array() for number in range(200)}}
    ),
    "not finite": lambda draw: pack(observation() | {"temperature": float("nan")}),
    "small image": lambda draw: pack(observation(draw.choice([1, 8, 63]))),
    "narrow image": lambda draw: pack(
        observation()
        | {
            "images": {
                "base": np.zeros(
                    draw.choice([(1, 64, 3), (64, 1, 3), (0, 64, 3), (64, 64, 0), (64, 64)]),
                    np.uint8,
                )
            }
        }
    ),
    "array for a name": lambda draw: pack(
        observation()
        | {
            draw.choice(
                ["instruction", "prompt", "model", "policy", "type", "session_id"]
            ): np.zeros(draw.choice([1, 3]))
        }
    ),
    "many rows": lambda draw: pack(
        {"images": {"base": np.zeros((40, 64, 64, 3), np.uint8)}, "instruction": "x"}
    ),
}
"""Kind -> a message in msgpack."""


def changed(data: bytes, draw: random.Random) -> bytes:
    buffer = bytearray(data)
    for _ in range(draw.randrange(1, 6)):
        buffer[draw.randrange(min(len(buffer), 200))] = draw.randrange(256)
    return bytes(buffer)


def post(
    path: str, body: bytes, length: int | None = None, kind: str = "application/json"
) -> bytes:
    size = len(body) if length is None else length
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n\r\n".encode()
        + body
    )


REQUESTS: dict[str, Callable[[random.Random], bytes]] = {
    "garbage": lambda draw: draw.randbytes(draw.randrange(1, 400)) + b"\r\n\r\n",
    "head without end": lambda draw: b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 5000,
    "bad head": lambda draw: draw.choice(
        [
            b"GET\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            post("/act", b"", -5),
            b"POST /act HTTP/1.1\r\nContent-Length: 1, 2\r\n\r\n",
        ]
    ),
    "body of gigabytes": lambda draw: post("/act", b"[", 1 << 40),
    "bad JSON": lambda draw: post(
        "/act",
        draw.choice([b"[" * 5000, b"{", b"1" * 5000, b"NaN", b"\xff", b"[" + b"0," * 9000 + b"0]"]),
    ),
    "bad arrays in JSON": lambda draw: post(
        "/act",
        json.dumps(
            {"image": {"__numpy__": "AAAA", "dtype": draw.choice(["|O", "<f8"]), "shape": [-1]}}
        ).encode(),
    ),
    "encoded twice": lambda draw: post(
        "/act", json.dumps({"encoded": json.dumps({"encoded": "{}"})}).encode()
    ),
    "no image": lambda draw: post("/act", json_pack({"instruction": "x"}).encode()),
    "bad msgpack": lambda draw: post(
        "/v1/actions/generations", FRAMES["changed bytes"](draw)[:300], kind="application/msgpack"
    ),
    "another host": lambda draw: post("/act", json_pack({"instruction": "x"}).encode()).replace(
        b"localhost", b"evil.example"
    ),
    "web page": lambda draw: (
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n\r\n"
    ),
}
"""Kind -> an HTTP request, or what resembles one."""


def connected(port: int) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(5)
    connection.connect(("127.0.0.1", port))
    return connection


def upgraded(port: int, path: str) -> socket.socket:
    """A websocket after its handshake, whatever the server said."""
    connection = connected(port)
    connection.sendall(UPGRADE.format(path=path).encode())
    connection.recv(1 << 16)
    return connection


def vanish(connection: socket.socket) -> None:
    """End a connection as a crashed machine's kernel does: with a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def seeded(number: int) -> random.Random:
    return random.Random(number)  # noqa: S311  (to be repeatable)

"""Files with a few flipped bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import strategies as st


@contextmanager
def changed_bytes(path: Path, data: st.DataObject) -> Iterator[None]:
    """The file has one to four other bytes within the context."""
    whole = path.read_bytes()
    try:
        broken = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 4))):
            broken[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(bytes(broken))
        yield
    finally:
        path.write_bytes(whole)

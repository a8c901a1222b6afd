"""The newest of something, in memory that one process writes and others read at any time, without ever waiting for each other."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import zlib
from pathlib import Path

MEMORY = Path("/dev/shm")  # noqa: S108  (mkstemp makes the files)
"""A file system that is no disk's: writing to a page of a disk's file may wait for that."""
_PREFIX = "rlinf-vla-"

_NEWEST = struct.Struct("Q")
"""Number of the newest writing; 0: none yet."""
_SLOT = struct.Struct("QQI4x")
"""Number of this writing, bytes that follow, their CRC-32."""
_ATTEMPTS = 1000


class Record:
    """Two slots, written in turn, so that the newest whole writing stays readable while the next is made, and if its writer dies meanwhile.

    The check sum makes it right on processors that reorder writes, too.
    """

    def __init__(self, path: Path, capacity: int | None = None) -> None:
        """Opens where ``path`` leads; the writer gives its ``capacity`` in bytes: that makes it anew. Raises OSError where nothing is."""
        self._path = path
        if capacity is not None:
            self.remove()
            made, name = tempfile.mkstemp(prefix=_PREFIX, dir=MEMORY if MEMORY.is_dir() else path.parent)
            os.truncate(made, _NEWEST.size + 2 * (_SLOT.size + capacity))
            os.close(made)
            path.symlink_to(name)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._slot = (len(self._memory) - _NEWEST.size) // 2
        self._number = 0

    def write(self, data: bytes) -> None:
        self._number += 1
        begin = _NEWEST.size + self._number % 2 * self._slot
        self._memory[begin + _SLOT.size : begin + _SLOT.size + len(data)] = data
        _SLOT.pack_into(self._memory, begin, self._number, len(data), zlib.crc32(data))
        self._memory[: _NEWEST.size] = _NEWEST.pack(self._number)  # at once; pack_into would write zeros first, which readers see

    def read(self) -> bytes | None:
        """The newest writing; None before the first."""
        for _ in range(_ATTEMPTS):  # the writer would have to overtake us so many times
            (newest,) = _NEWEST.unpack_from(self._memory, 0)
            if newest == 0:
                return None
            begin = _NEWEST.size + newest % 2 * self._slot
            number, length, check = _SLOT.unpack_from(self._memory, begin)
            if number == newest and length <= self._slot - _SLOT.size:
                data = self._memory[begin + _SLOT.size : begin + _SLOT.size + length]
                if zlib.crc32(data) == check:
                    return data
        raise OSError("a shared record cannot be read: its writer writes without a pause")

    def close(self) -> None:
        self._memory.close()

    def remove(self) -> None:
        """By its writer. Who reads it already, goes on to."""
        if self._path.is_symlink() and (memory := self._path.readlink()).name.startswith(_PREFIX):
            memory.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)

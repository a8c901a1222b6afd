"""Share the newest record or camera frame between processes by memory, without locks or waiting."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import zlib
from pathlib import Path

import numpy as np

from rlinf_vla.features.realworld.robot import Frame

MEMORY = Path("/dev/shm")  # noqa: S108  (mkstemp makes the files)
"""File system in memory: writing to a mapped page of a file on disk may block."""
_PREFIX = "rlinf-vla-"

_NEWEST = struct.Struct("Q")
"""Number of the newest version; 0 before the first."""
_SLOT = struct.Struct("QQI4x")
"""Number of this version, length of its data in bytes, their CRC-32."""
_ATTEMPTS = 1000


class SharedRecord:
    """Two slots, written in turn, in shared memory; one writer, any number of readers.

    The newest complete version stays readable while the next is written, even if the writer dies.
    The checksum also makes this correct on processors that reorder writes.
    """

    def __init__(self, path: Path, capacity: int | None = None) -> None:
        """Open the record at ``path``; the writer gives ``capacity`` in bytes and creates it anew.

        Raises OSError if a reader finds none.
        """
        self._path = path
        self._target: str | None = None
        """Path in memory, known to the writer."""
        if capacity is not None:
            self.remove()
            descriptor, name = tempfile.mkstemp(
                prefix=_PREFIX, dir=MEMORY if MEMORY.is_dir() else path.parent
            )
            os.truncate(descriptor, _NEWEST.size + 2 * (_SLOT.size + capacity))
            os.close(descriptor)
            path.symlink_to(name)
            self._target = name
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._slot = (len(self._memory) - _NEWEST.size) // 2
        self._number = 0

    def write(self, data: bytes) -> None:
        self._number += 1
        begin = _NEWEST.size + self._number % 2 * self._slot
        self._memory[begin + _SLOT.size : begin + _SLOT.size + len(data)] = data
        _SLOT.pack_into(self._memory, begin, self._number, len(data), zlib.crc32(data))
        self._memory[: _NEWEST.size] = _NEWEST.pack(
            self._number
        )  # one write; pack_into would first write zeros, which readers see

    def read(self) -> bytes | None:
        """Return the newest version, or None before the first.

        Raises OSError if the writer overwrites every version while it is read.
        """
        for _ in range(_ATTEMPTS):  # fails only if the writer overtakes every attempt
            (newest,) = _NEWEST.unpack_from(self._memory, 0)
            if newest == 0:
                return None
            begin = _NEWEST.size + newest % 2 * self._slot
            number, length, check = _SLOT.unpack_from(self._memory, begin)
            if number == newest and length <= self._slot - _SLOT.size:
                data = self._memory[begin + _SLOT.size : begin + _SLOT.size + length]
                if zlib.crc32(data) == check:
                    return data
        raise OSError("a shared record cannot be read: its writer never pauses")

    @property
    def intact(self) -> bool:
        """Whether the path still leads to the record; called by its writer."""
        try:
            return self._target is not None and self._path.readlink() == Path(self._target)
        except OSError:
            return False

    def restore(self) -> None:
        """Let the path lead to the record again; called by its writer. Raises OSError."""
        assert self._target is not None
        self._path.unlink(missing_ok=True)
        self._path.symlink_to(self._target)

    def remove(self) -> None:
        """Remove the record. Called by its writer; open readers can still read it."""
        if self._target is not None:
            Path(self._target).unlink(missing_ok=True)
        if self._path.is_symlink() and (memory := self._path.readlink()).name.startswith(_PREFIX):
            memory.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)


_HEADER = struct.Struct("=dQHH")
"""Time, number, height, width."""


class FrameRecord:
    """Newest frame of one camera; one writer, any number of readers."""

    def __init__(self, path: Path, size: tuple[int, int] | None = None) -> None:
        """Open the record; the writer gives the frames' ``size``: height and width in pixels.

        Raises OSError if there is nothing to read.
        """
        self._record = SharedRecord(
            path, None if size is None else _HEADER.size + size[0] * size[1] * 3
        )

    def write(self, frame: Frame) -> None:
        height, width, _ = frame.image.shape
        self._record.write(
            _HEADER.pack(frame.time, frame.number, height, width) + frame.image.tobytes()
        )

    def read(self) -> Frame | None:
        """Return the newest frame, or None before the first."""
        data = self._record.read()
        if data is None:
            return None
        time, number, height, width = _HEADER.unpack_from(data)
        return Frame(
            time,
            number,
            np.frombuffer(data, np.uint8, offset=_HEADER.size).reshape(height, width, 3),
        )

    def remove(self) -> None:
        self._record.remove()

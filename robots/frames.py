"""Share camera frames between processes through shared memory."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from rlinf_vla.core.robot import Frame

from .shared_record import SharedRecord

_HEADER = struct.Struct("=dQHH")
"""Time, number, height, width."""


class FrameRecord:
    """Newest frame of one camera; one writer, any number of readers."""

    def __init__(self, path: Path, size: tuple[int, int] | None = None) -> None:
        """Open the record; the writer gives the frames' ``size``: height and width in pixels.

        Raises OSError if there is nothing to read.
        """
        self._record = SharedRecord(path, None if size is None else _HEADER.size + size[0] * size[1] * 3)

    def write(self, frame: Frame) -> None:
        height, width, _ = frame.image.shape
        self._record.write(_HEADER.pack(frame.time, frame.number, height, width) + frame.image.tobytes())

    def read(self) -> Frame | None:
        """Return the newest frame, or None before the first."""
        data = self._record.read()
        if data is None:
            return None
        time, number, height, width = _HEADER.unpack_from(data)
        return Frame(time, number, np.frombuffer(data, np.uint8, offset=_HEADER.size).reshape(height, width, 3))

    def close(self) -> None:
        self._record.close()

    def remove(self) -> None:
        self._record.remove()

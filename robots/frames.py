"""Pictures in shared memory: from the process that makes them to any that looks."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from rlinf_vla.robot import Frame

from .record import Record

_HEADER = struct.Struct("=dQHH")
"""Time, number, height, width."""


class FrameRecord:
    def __init__(self, path: Path, size: tuple[int, int] | None = None) -> None:
        """The writer gives the pictures' ``size``, height and width in pixels. Raises OSError where there is nothing to read."""
        self._record = Record(path, None if size is None else _HEADER.size + size[0] * size[1] * 3)

    def write(self, frame: Frame) -> None:
        height, width, _ = frame.image.shape
        self._record.write(_HEADER.pack(frame.time, frame.number, height, width) + frame.image.tobytes())

    def read(self) -> Frame | None:
        """The newest; None before the first."""
        data = self._record.read()
        if data is None:
            return None
        time, number, height, width = _HEADER.unpack_from(data)
        return Frame(time, number, np.frombuffer(data, np.uint8, offset=_HEADER.size).reshape(height, width, 3))

    def close(self) -> None:
        self._record.close()

    def remove(self) -> None:
        self._record.remove()

"""Write a dataset's data and video files, each filled with episodes up to a size limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.lerobot_format import Column, Feature
from rlinf_vla.data.lerobot_video import VideoFile


def _full(size: int, frames: int, coming: int, limit: int) -> bool:
    """Whether ``coming`` more frames of mean size would reach ``limit`` MB; lerobot's rule."""
    return size * (frames + coming) >= limit * form.MEGABYTE * frames


class DataFiles:
    """Parquet files with one row group per episode, so that an episode can be read alone."""

    def __init__(self, directory: Path, schema: pa.Schema) -> None:
        self._directory, self._schema = directory, schema
        self._number, self._frames = -1, 0
        self._sink: Any = None
        self._writer: Any = None

    def add(self, episode: pa.Table) -> dict[str, Any]:
        """Write an episode and return its columns of ``meta/episodes``."""
        if self._writer is None or _full(self._sink.tell(), self._frames, len(episode), form.DATA_FILE_MB):
            self._next()
        self._writer.write_table(episode, row_group_size=len(episode))
        self._frames += len(episode)
        return {f"data/{name}": value for name, value in form.place(self._number).items()}

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._sink.close()
            self._writer = None

    def _next(self) -> None:
        self.close()
        self._number, self._frames = self._number + 1, 0
        path = self._directory / form.DATA_PATH.format(**form.place(self._number))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pq.ParquetWriter(self._sink, self._schema, compression="snappy")


class VideoFiles:
    """Video files of one camera."""

    def __init__(self, directory: Path, key: str, feature: Feature, fps: int) -> None:
        self._directory, self._key, self._feature, self._fps = directory, key, feature, fps
        self._number = -1
        self._file: VideoFile | None = None

    def add(self, frames: Column) -> dict[str, Any]:
        """Write frames ``[L, H, W, 3]`` of an episode and return columns of ``meta/episodes``."""
        if self._file is None or _full(self._file.bytes, self._file.frames, len(frames), form.VIDEO_FILE_MB):
            self.close()
            self._number += 1
            path = self._directory / form.VIDEO_PATH.format(video_key=self._key, **form.place(self._number))
            self._file = VideoFile(path, self._feature.image_size, self._fps)
        first = self._file.frames
        self._file.add(frames)
        times = {"from_timestamp": first / self._fps, "to_timestamp": self._file.frames / self._fps}
        return {f"videos/{self._key}/{name}": value for name, value in (form.place(self._number) | times).items()}

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

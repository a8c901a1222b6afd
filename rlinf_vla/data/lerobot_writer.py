"""Write a LeRobotDataset v3.0, episode by episode.

``meta/info.json`` is written last: :class:`LeRobotReader` rejects the directory until then.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.io import write_text
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.lerobot_format import Column, Feature, Frame
from rlinf_vla.data.lerobot_statistics import Statistics, histogram, of_images, of_vectors
from rlinf_vla.data.lerobot_video import VideoFile, video_info


class LeRobotWriter:
    """Context manager: a normal exit finalizes the dataset, an exception removes it.

    A killed process leaves files without ``meta/info.json``, which no reader accepts.
    """

    def __init__(
        self,
        directory: Path,
        fps: float,
        features: Mapping[str, Feature],
        robot_type: str | None = None,
        cameras: Mapping[str, Any] | None = None,
    ) -> None:
        """``directory``: new or empty. ``features``: all but INDICES; numbers ``(1,)`` or ``(D,)``.
        ``cameras``: feature -> what is known of its geometry, as JSON values.

        Raises UserError if the directory is not empty, or ``fps`` or a feature cannot be written.
        """
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UserError(
                f"{directory} is not empty: choose another directory for the dataset, or empty this one"
            )
        if fps < 1 or fps != int(fps):
            raise UserError(
                f"{directory}: a LeRobotDataset has a whole number of frames per second, not {fps:g}"
            )
        for key, feature in features.items():
            _check_feature(key, feature)
        self.directory = directory
        self.fps = int(fps)
        self.episodes = 0
        self.frames = 0
        videos = {key: feature for key, feature in features.items() if feature.dtype == "video"}
        described = {
            key: replace(feature, info=video_info(feature.image_size, self.fps))
            for key, feature in videos.items()
        }
        self._features = {**features, **described, **form.INDICES}
        self._schema = form.data_schema(self._features)
        self._robot_type = robot_type
        self._cameras = dict(cameras or {})
        self._tasks: dict[str, int] = {}
        self._rows: list[dict[str, Any]] = []
        numbers = [
            key
            for key, feature in self._features.items()
            if not feature.is_camera and feature.dtype != "string"
        ]
        self._columns: dict[str, list[Column]] = {key: [] for key in numbers}
        self._histograms = {
            key: np.zeros((3, 256), np.int64)
            for key, feature in features.items()
            if feature.is_camera
        }
        self._data = _Files(
            directory,
            form.DATA_PATH,
            "",
            form.DATA_FILE_MB,
            partial(_DataFile, schema=self._schema),
        )
        self._videos = {
            key: _Files(
                directory,
                form.VIDEO_PATH,
                key,
                form.VIDEO_FILE_MB,
                partial(VideoFile, size=feature.image_size, fps=self.fps),
            )
            for key, feature in videos.items()
        }
        directory.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> LeRobotWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finalize()
        else:
            with suppress(Exception):  # closing may be what failed
                self._close()
            shutil.rmtree(self.directory)

    def add_episode(self, frames: Mapping[str, Column], task: str) -> None:
        """Write an episode: features ``[L, *shape]``, also ``[L]`` for the shape ``(1,)``, cameras
        uint8 ``[L, H, W, 3]``.

        Raises UserError, with nothing written, if the frames do not match the features.
        """
        frames = {
            key: column.squeeze(1) if column.shape[1:] == (1,) else column
            for key, column in frames.items()
        }  # as lerobot stores them
        length = self._check(frames)
        task_index = self._tasks.setdefault(task, len(self._tasks))
        steps = np.arange(length)
        values = dict(frames) | {
            "timestamp": (steps / self.fps).astype(np.float32),
            "frame_index": steps,
            "episode_index": np.full(length, self.episodes),
            "index": self.frames + steps,
            "task_index": np.full(length, task_index),
        }
        row: dict[str, Any] = {"episode_index": self.episodes, "tasks": [task], "length": length}
        location, _ = self._data.add(self._table(values))
        row |= {f"data/{name}": value for name, value in location.items()}
        row |= {"dataset_from_index": self.frames, "dataset_to_index": self.frames + length}
        for key, files in self._videos.items():
            location, first = files.add(frames[key])
            times = {
                "from_timestamp": first / self.fps,
                "to_timestamp": (first + length) / self.fps,
            }
            row |= {f"videos/{key}/{name}": value for name, value in (location | times).items()}
        for key, statistics in self._remember(values).items():
            row |= {f"stats/{key}/{name}": value for name, value in statistics.items()}
        self._rows.append(
            row | {f"{form.EPISODES}/{name}": value for name, value in form.place(0).items()}
        )
        self.episodes += 1
        self.frames += length

    def finalize(self) -> None:
        """Close all files and write ``meta/``. Raises UserError if no episode was added."""
        self._close()
        if not self.episodes:
            shutil.rmtree(self.directory)
            raise UserError(
                f"{self.directory}: no episode was recorded, so there is no dataset to write"
            )
        statistics = {
            key: of_vectors(np.concatenate(parts)) for key, parts in self._columns.items()
        }
        statistics |= {
            key: of_images(counts, self.frames) for key, counts in self._histograms.items()
        }
        episodes = self.directory / form.EPISODES_PATH.format(**form.place(0))
        episodes.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(self._rows), episodes)
        pq.write_table(form.tasks_table(list(self._tasks)), self.directory / form.TASKS)
        (self.directory / form.STATS).write_text(json.dumps(statistics, indent=4))
        write_text(self.directory / form.INFO, json.dumps(self._info(), indent=4))

    def _info(self) -> dict[str, Any]:
        return {
            "codebase_version": form.VERSION,
            "robot_type": self._robot_type,
            "total_episodes": self.episodes,
            "total_frames": self.frames,
            "total_tasks": len(self._tasks),
            "chunks_size": form.CHUNKS_SIZE,
            "data_files_size_in_mb": form.DATA_FILE_MB,
            "video_files_size_in_mb": form.VIDEO_FILE_MB,
            "fps": self.fps,
            "splits": {"train": f"0:{self.episodes}"},
            "data_path": form.DATA_PATH,
            "video_path": form.VIDEO_PATH if self._videos else None,
            "features": {key: feature.as_json() for key, feature in self._features.items()},
        } | ({"cameras": self._cameras} if self._cameras else {})

    def _close(self) -> None:
        for files in (self._data, *self._videos.values()):
            files.close()

    def _check(self, frames: Mapping[str, Column]) -> int:
        expected = self._features.keys() - form.INDICES.keys()
        if frames.keys() != expected:
            raise UserError(
                f"episode {self.episodes} has features {sorted(frames)}, the dataset {sorted(expected)}"
            )
        length = len(next(iter(frames.values())))
        for key, values in frames.items():
            feature = self._features[key]
            dtype = "uint8" if feature.is_camera else feature.dtype
            shape = (length,) if feature.shape == (1,) else (length, *feature.shape)
            right = (
                values.dtype.kind in "UO" if dtype == "string" else values.dtype == np.dtype(dtype)
            )
            if not right or values.shape != shape or length == 0:
                raise UserError(
                    f"episode {self.episodes}: {key} is {values.dtype} {list(values.shape)}, "
                    f"the dataset wants {dtype} {list(shape) if length else '[at least 1 frame]'}"
                )
            if (frame := form.first_not_finite(values)) is not None:
                raise UserError(f"episode {self.episodes}: {key} is not finite at frame {frame}")
        return length

    def _table(self, values: Mapping[str, Column]) -> pa.Table:
        columns = []
        for field in self._schema:
            feature = self._features[field.name]
            value = values[field.name]
            if feature.dtype == "image":
                columns.append(
                    pa.array([{"bytes": _png(frame), "path": None} for frame in value], field.type)
                )
            elif value.ndim == 2:
                columns.append(
                    pa.FixedSizeListArray.from_arrays(pa.array(value.ravel()), value.shape[1])
                )
            else:
                columns.append(pa.array(value, field.type))
        return pa.Table.from_arrays(columns, schema=self._schema)

    def _remember(self, values: Mapping[str, Column]) -> dict[str, Statistics]:
        """Return an episode's statistics, and store what those of the dataset need."""
        statistics = {}
        for key, value in values.items():
            if key in self._histograms:
                counts = histogram(value)
                self._histograms[key] += counts
                statistics[key] = of_images(counts, len(value))
            elif key in self._columns:
                self._columns[key].append(value)
                statistics[key] = of_vectors(value)
        return statistics


class _Files:
    """Numbered files of one kind, each filled with whole episodes up to a size limit."""

    def __init__(
        self, directory: Path, template: str, key: str, limit: int, create: Callable[[Path], Any]
    ) -> None:
        """limit: in MB. create: opens a file with ``add``, ``close``, ``frames`` and ``bytes``."""
        self._directory = directory
        self._template = template
        self._key = key
        self._limit = limit
        self._create = create
        self._number = -1
        self._file: Any = None

    def add(self, episode: Any) -> tuple[dict[str, int], int]:
        """Write an episode; return the place of its file, and its first frame in that file."""
        file = self._file
        # lerobot's rule: full if this many more frames of mean size would reach the limit
        if (
            file is None
            or file.bytes * (file.frames + len(episode))
            >= self._limit * form.MEGABYTE * file.frames
        ):
            self.close()
            self._number += 1
            path = self._directory / self._template.format(
                video_key=self._key, **form.place(self._number)
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            file = self._file = self._create(path)
        first: int = file.frames
        file.add(episode)
        return form.place(self._number), first

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class _DataFile:
    """A parquet file with one row group per episode, so that an episode can be read alone."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.frames = 0
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pq.ParquetWriter(self._sink, schema, compression="snappy")

    @property
    def bytes(self) -> int:
        return int(self._sink.tell())

    def add(self, episode: pa.Table) -> None:
        self._writer.write_table(episode, row_group_size=len(episode))
        self.frames += len(episode)

    def close(self) -> None:
        self._writer.close()
        self._sink.close()


def _check_feature(key: str, feature: Feature) -> None:
    if "/" in key or key in form.INDICES:
        raise UserError(
            f"feature {key!r} cannot be written: {'its name has a slash' if '/' in key else 'every dataset has it already'}"
        )
    if feature.is_camera:
        if feature.shape != (*feature.image_size, 3):
            raise UserError(f"{key}: images are [height, width, 3], not {list(feature.shape)}")
        if feature.dtype == "video" and any(side % 2 for side in feature.image_size):
            raise UserError(
                f"{key}: video needs even sides, not {list(feature.shape)}: write images, or choose another size"
            )
    elif len(feature.shape) != 1 or feature.dtype in ("image", "video"):
        raise UserError(
            f"{key}: {feature.dtype} of shape {list(feature.shape)} cannot be written, only scalars, vectors and RGB images"
        )


def _png(frame: Frame) -> bytes:
    file = BytesIO()
    Image.fromarray(frame).save(file, "png")
    return file.getvalue()

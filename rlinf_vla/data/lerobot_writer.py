"""Write a LeRobotDataset v3.0, episode by episode.

``meta/info.json`` is written last: :class:`LeRobotReader` rejects the directory until then.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
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
from rlinf_vla.data.lerobot_files import DataFiles, VideoFiles
from rlinf_vla.data.lerobot_format import Column, Feature, Frame
from rlinf_vla.data.lerobot_statistics import Statistics, histogram, of_images, of_vectors
from rlinf_vla.data.lerobot_video import video_info


class LeRobotWriter:
    """Context manager: a normal exit finalizes the dataset, an exception removes it.

    A killed process leaves files without ``meta/info.json``, which no reader accepts.
    """

    def __init__(self, directory: Path, fps: float, features: Mapping[str, Feature], robot_type: str | None = None) -> None:
        """``directory``: new or empty. ``features``: all but INDICES; numbers ``(1,)`` or ``(D,)``.

        Raises UserError if the directory is not empty, or ``fps`` or a feature cannot be written.
        """
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UserError(f"{directory} is not empty: choose another directory for the dataset, or empty this one")
        if fps < 1 or fps != int(fps):
            raise UserError(f"{directory}: a LeRobotDataset has a whole number of frames per second, not {fps:g}")
        for key, feature in features.items():
            _check_feature(key, feature)
        self.directory, self.fps, self.episodes, self.frames = directory, int(fps), 0, 0
        self._features = {key: self._described(feature) for key, feature in features.items()} | form.INDICES
        self._schema = form.data_schema(self._features)
        self._robot_type = robot_type
        self._tasks: dict[str, int] = {}
        self._rows: list[dict[str, Any]] = []
        self._columns: dict[str, list[Column]] = {key: [] for key, feature in self._features.items() if not feature.is_camera}
        self._histograms = {key: np.zeros((3, 256), np.int64) for key, feature in features.items() if feature.is_camera}
        self._data = DataFiles(directory, self._schema)
        self._videos = {key: VideoFiles(directory, key, feature, self.fps) for key, feature in features.items() if feature.dtype == "video"}
        directory.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> LeRobotWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.finalize()
        else:
            with suppress(Exception):  # closing may be what failed
                self._close()
            shutil.rmtree(self.directory)

    def add_episode(self, frames: Mapping[str, Column], task: str) -> None:
        """Write an episode: features ``[L, *shape]``, cameras uint8 ``[L, H, W, 3]``.

        Raises UserError, with nothing written, if the frames do not match the features.
        """
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
        row |= self._data.add(self._table(values))
        row |= {"dataset_from_index": self.frames, "dataset_to_index": self.frames + length}
        for key, files in self._videos.items():
            row |= files.add(frames[key])
        for key, found in self._remember(values).items():
            row |= {f"stats/{key}/{name}": value for name, value in found.items()}
        self._rows.append(row | {f"{form.EPISODES}/{name}": value for name, value in form.place(0).items()})
        self.episodes += 1
        self.frames += length

    def finalize(self) -> None:
        """Close all files and write ``meta/``. Raises UserError if no episode was added."""
        self._close()
        if not self.episodes:
            shutil.rmtree(self.directory)
            raise UserError(f"{self.directory}: no episode was recorded, so there is no dataset to write")
        statistics = {key: of_vectors(np.concatenate(parts)) for key, parts in self._columns.items() if self._is_number(key)}
        statistics |= {key: of_images(counts, self.frames) for key, counts in self._histograms.items()}
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
        }

    def _close(self) -> None:
        self._data.close()
        for files in self._videos.values():
            files.close()

    def _described(self, feature: Feature) -> Feature:
        if feature.dtype != "video":
            return feature
        return Feature(feature.dtype, feature.shape, feature.names, video_info(feature.image_size, self.fps))

    def _is_number(self, key: str) -> bool:
        return self._features[key].dtype != "string"

    def _check(self, frames: Mapping[str, Column]) -> int:
        wanted = self._features.keys() - form.INDICES.keys()
        if frames.keys() != wanted:
            raise UserError(f"episode {self.episodes} has features {sorted(frames)}, the dataset {sorted(wanted)}")
        length = len(next(iter(frames.values())))
        for key, values in frames.items():
            feature = self._features[key]
            dtype = "uint8" if feature.is_camera else feature.dtype
            shape = (length,) if feature.shape == (1,) else (length, *feature.shape)
            right = values.dtype.kind in "UO" if dtype == "string" else values.dtype == np.dtype(dtype)
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
            feature, value = self._features[field.name], values[field.name]
            if feature.dtype == "image":
                columns.append(pa.array([{"bytes": _png(frame), "path": None} for frame in value], field.type))
            elif value.ndim == 2:
                columns.append(pa.FixedSizeListArray.from_arrays(pa.array(value.ravel()), value.shape[1]))
            else:
                columns.append(pa.array(value, field.type))
        return pa.Table.from_arrays(columns, schema=self._schema)

    def _remember(self, values: Mapping[str, Column]) -> dict[str, Statistics]:
        """Return an episode's statistics, and store what those of the dataset need."""
        found = {}
        for key, value in values.items():
            if key in self._histograms:
                counts = histogram(value)
                self._histograms[key] += counts
                found[key] = of_images(counts, len(value))
            elif self._is_number(key):
                self._columns[key].append(value)
                found[key] = of_vectors(value)
        return found


def _check_feature(key: str, feature: Feature) -> None:
    if "/" in key or key in form.INDICES:
        raise UserError(f"feature {key!r} cannot be written: {'its name has a slash' if '/' in key else 'every dataset has it already'}")
    if feature.is_camera:
        if feature.shape != (*feature.image_size, 3):
            raise UserError(f"{key}: images are [height, width, 3], not {list(feature.shape)}")
        if feature.dtype == "video" and any(side % 2 for side in feature.image_size):
            raise UserError(f"{key}: video needs even sides, not {list(feature.shape)}: write images, or choose another size")
    elif len(feature.shape) != 1 or feature.dtype in ("image", "video"):
        raise UserError(f"{key}: {feature.dtype} of shape {list(feature.shape)} cannot be written, only scalars, vectors and RGB images")


def _png(frame: Frame) -> bytes:
    file = BytesIO()
    Image.fromarray(frame).save(file, "png")
    return file.getvalue()

"""Read a LeRobotDataset v3.0 episode by episode, written by this project or by LeRobot's tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, UnidentifiedImageError

from rlinf_vla.config.errors import UserError
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.lerobot_format import Column, Feature, Frame
from rlinf_vla.data.lerobot_video import read_frames

CONVERTER = "python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=ID"
"""LeRobot's conversion script from v2.1."""


@dataclass(frozen=True)
class Episode:
    """An episode of ``L`` frames: columns ``[L, *shape]``, ``L`` instructions, seconds ``[L]``."""

    number: int
    columns: dict[str, Column]
    instruction: list[str]
    time: Column

    def __len__(self) -> int:
        return len(self.time)


class LeRobotReader:
    """Dataset with ``features`` and ``fps`` of ``meta/info.json``; ``len()`` counts episodes."""

    def __init__(self, directory: Path) -> None:
        """Read ``meta/``. Raises UserError for missing or damaged files or another version."""
        self.directory = directory
        info = _info(directory)
        try:
            self.fps = float(info["fps"])
            self.features = {
                key: Feature(each["dtype"], tuple(each["shape"]), each.get("names"), each.get("info") or {})
                for key, each in info["features"].items()
            }
            self._templates = {"data": info["data_path"], "video": info.get("video_path") or ""}
            counted = (int(info["total_episodes"]), int(info["total_frames"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{directory / form.INFO} is not a valid LeRobotDataset info file ({type(error).__name__}: {error})") from None
        self._tasks = self._read_tasks()
        self._rows = self._read_rows()
        found = (len(self._rows), sum(row["length"] for row in self._rows))
        if found != counted or not found[0]:
            raise UserError(
                f"{directory / form.EPISODES} has {found[0]} episodes with {found[1]} frames, "
                f"{form.INFO} says {counted[0]} with {counted[1]}: the recording was not finished, or not copied whole"
            )
        for path in sorted({self._path(row, key) for row in self._rows for key in ("data", *self._videos)}):
            if not path.exists():
                raise UserError(f"{path} is missing: copy the dataset again")

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def cameras(self) -> dict[str, Feature]:
        """Features that are colour images."""
        return {key: feature for key, feature in self.features.items() if feature.is_camera}

    def listed(self) -> list[tuple[int, str]]:
        """Return the number of frames and the instruction of each episode."""
        return [(int(row["length"]), ", ".join(map(str, row.get("tasks") or []))) for row in self._rows]

    def camera(self, name: str) -> str | None:
        """Return the camera called ``name``, with or without ``observation.images.``, or None."""
        return next((key for key in self.cameras if name in (key, form.short_name(key))), None)

    def episode(self, number: int, columns: Sequence[str]) -> Episode:
        """Read an episode. Raises UserError for missing columns or frames and non-finite values."""
        for key in columns:
            if key not in self.features:
                known = ", ".join(key for key in self.features if key not in form.INDICES)
                raise UserError(f"{self.directory} has no feature {key} (it has {known})")
        table = self._table(number, [*columns, "timestamp", "task_index"])
        found = {key: self._values(table, key) for key in columns}
        for key, values in found.items():
            if (frame := form.first_not_finite(values)) is not None:
                raise UserError(f"{self.directory}: {key} is not finite in episode {number}, frame {frame}: leave that episode out")
        try:
            instruction = [self._tasks[index] for index in table.column("task_index").to_pylist()]
        except KeyError as error:
            raise UserError(f"{self.directory / form.TASKS} has no task {error} of episode {number}: copy the dataset again") from None
        return Episode(number, found, instruction, self._values(table, "timestamp"))

    def frames(self, episode: Episode, camera: str, first: int = 0) -> Iterator[Frame]:
        """Yield a camera's images from frame ``first`` on, uint8 ``[H, W, 3]``.

        Raises UserError if one cannot be read.
        """
        size = self.features[camera].image_size
        for index, frame in enumerate(self._frames(episode, camera, first), first):
            if frame.shape != (*size, 3):
                raise UserError(
                    f"{self.directory}: {camera} has images of {frame.shape[0]}x{frame.shape[1]} pixels (episode {episode.number}, "
                    f"frame {index}), {form.INFO} says {size[0]}x{size[1]}"
                )
            yield frame

    def _frames(self, episode: Episode, camera: str, first: int) -> Iterator[Frame]:
        row = self._rows[episode.number]
        if camera in self._videos:
            begin = row[f"videos/{camera}/from_timestamp"]
            yield from read_frames(self._path(row, camera), [begin + float(time) for time in episode.time[first:]])
            return
        for index, image in enumerate(self._table(episode.number, [camera]).column(camera)[first:], first):
            try:
                yield np.asarray(Image.open(BytesIO(image.as_py()["bytes"])).convert("RGB"))
            except (UnidentifiedImageError, OSError, TypeError, SyntaxError):
                raise UserError(f"{self._path(row, 'data')}: {camera} of episode {episode.number}, frame {index}, is no image") from None

    @property
    def _videos(self) -> list[str]:
        return [key for key, feature in self.cameras.items() if feature.dtype == "video"]

    def _read_tasks(self) -> dict[int, str]:
        table = _parquet(self.directory / form.TASKS)
        # pandas stores an unnamed index as __index_level_0__
        text = next((name for name in ("task", "__index_level_0__") if name in table.column_names), None)
        if text is None or "task_index" not in table.column_names:
            raise UserError(f"{self.directory / form.TASKS} has columns {table.column_names}, not task_index and task")
        return dict(zip(table.column("task_index").to_pylist(), map(str, table.column(text).to_pylist()), strict=True))

    def _read_rows(self) -> list[dict[str, Any]]:
        """Return the rows of ``meta/episodes``, in order of episode."""
        paths = sorted((self.directory / form.EPISODES).glob("*/*.parquet"))
        if not paths:
            raise UserError(f"{self.directory / form.EPISODES} holds no parquet file: the recording was not finished, or not copied whole")
        wanted = {"episode_index", "length", "data/chunk_index", "data/file_index"}
        for key in self._videos:
            wanted |= {f"videos/{key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")}
        rows: list[dict[str, Any]] = []
        for path in paths:
            table = _parquet(path, [*wanted, "tasks"])
            if not wanted <= set(table.column_names) or any(table.column(name).null_count for name in wanted):
                missing = min(wanted - set(table.column_names), default="some values")
                raise UserError(f"{path} lacks {missing}: the recording was not finished, or not copied whole")
            rows += table.to_pylist()
        rows.sort(key=lambda row: int(row["episode_index"]))
        if [row["episode_index"] for row in rows] != list(range(len(rows))):
            raise UserError(f"{self.directory / form.EPISODES}: its episodes are not numbered 0 to {len(rows) - 1}: copy the dataset again")
        return rows

    def _path(self, row: Mapping[str, Any], kind: str) -> Path:
        """Return the path of an episode's data (``kind="data"``) or of a camera's video."""
        prefix, template = ("data", self._templates["data"]) if kind == "data" else (f"videos/{kind}", self._templates["video"])
        numbers = {name: row[f"{prefix}/{name}"] for name in ("chunk_index", "file_index")}
        try:
            path = Path(template.format(video_key=kind, **numbers))
        except (LookupError, ValueError, AttributeError):
            path = Path("..")
        if path.is_absolute() or ".." in path.parts or path == Path():
            raise UserError(f"{self.directory / form.INFO}: {template!r} is not a path template inside the dataset")
        return self.directory / path

    def _table(self, number: int, columns: list[str]) -> pa.Table:
        """Return these columns of an episode, with all frames in order."""
        row = self._rows[number]
        path = self._path(row, "data")
        table = _parquet(path, [*columns, "frame_index"], [("episode_index", "=", number)])
        missing = sorted({*columns, "frame_index"} - set(table.column_names))
        if missing:
            raise UserError(f"{path} has no column {missing[0]}, which {form.INFO} names")
        if table.column("frame_index").to_pylist() != list(range(row["length"])):
            raise UserError(f"{path} does not hold the {row['length']} frames of episode {number} in their order: copy the dataset again")
        return table

    def _values(self, table: pa.Table, key: str) -> Column:
        """Return ``[L]`` for a scalar feature, else ``[L, *shape]``."""
        feature = self.features.get(key) or form.INDICES[key]
        shape = () if feature.shape == (1,) else feature.shape
        try:
            values = np.array(table.column(key).to_pylist(), dtype=object if feature.dtype == "string" else feature.dtype)
            return values.reshape(len(table), *shape)
        except (TypeError, ValueError) as error:
            said = f"{feature.dtype} {list(feature.shape)}"
            raise UserError(f"{self.directory}: {key} is not {said}, as {form.INFO} says ({error})") from None


def _info(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory: name one that holds a LeRobotDataset")
    path = directory / form.INFO
    if not path.exists():
        begun = any((directory / name).exists() for name in ("data", "meta", "videos"))
        wrong = "its recording was never finished" if begun else "it is no LeRobotDataset"
        raise UserError(f"{directory} has no {form.INFO}: {wrong}")
    try:
        info: dict[str, Any] = json.loads(path.read_text())
        version = str(info["codebase_version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}): copy the dataset again") from None
    if version.startswith("v2."):
        raise UserError(f"{directory} is a LeRobotDataset {version}, {form.VERSION} is wanted: convert it with {CONVERTER}")
    if not version.startswith("v3."):
        raise UserError(f"{directory} is a LeRobotDataset {version}, only {form.VERSION} can be read")
    return info


def _parquet(path: Path, columns: list[str] | None = None, filters: list[tuple[str, str, int]] | None = None) -> pa.Table:
    """Read those ``columns`` that the file has; None reads all. Raises UserError if unreadable."""
    try:
        kept = None if columns is None else [name for name in pq.read_schema(path).names if name in columns]
        return pq.read_table(path, columns=kept, filters=filters, partitioning=None)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: copy the dataset again") from None
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read ({reason}): it was cut short, copy the dataset again") from None

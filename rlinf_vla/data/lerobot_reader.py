"""Read a LeRobotDataset episode by episode, written by this project or by LeRobot's tools."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from rlinf_vla.config.errors import UserError
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.lerobot_columns import opened, picture, read_table, require_size, values
from rlinf_vla.data.lerobot_format import Column, Feature, Frame
from rlinf_vla.data.lerobot_info import read_info
from rlinf_vla.data.lerobot_layout import SECONDS, WHOLE, layout_of, said
from rlinf_vla.data.lerobot_video import TOLERANCE, read_frames

_INDICES = {"timestamp": SECONDS, "frame_index": WHOLE, "task_index": WHOLE}


@dataclass(frozen=True)
class Episode:
    """An episode of ``L`` frames: columns ``[L, *shape]``, those of one number per frame ``[L]``;
    ``L`` instructions, seconds ``[L]``."""

    number: int
    columns: dict[str, Column]
    instruction: list[str]
    time: Column

    def __len__(self) -> int:
        return len(self.time)

    def vectors(self, key: str) -> Column:
        """Return a column as ``[L, D]``, also if ``D`` is 1."""
        return self.columns[key].reshape(len(self), -1)


class LeRobotReader:
    """Dataset with ``features`` and ``fps`` of ``meta/info.json``; ``len()`` counts episodes."""

    def __init__(self, directory: Path) -> None:
        """Read ``meta/``. Raises UserError for missing or damaged files or another version."""
        self.directory = directory
        self._info = read_info(directory)
        self.fps = self._info.fps
        self.features = self._info.features
        self._layout = layout_of(directory, self._info)
        self._tasks = self._layout.texts()
        self._rows = self._layout.rows()
        self._checked: dict[Path, set[str]] = defaultdict(set)
        self._rows_of: Counter[Path] = Counter()
        for row in self._rows:
            self._rows_of[self._layout.path(row, "data")] += row["length"]
        actual = (len(self._rows), self._rows_of.total())
        counted = (self._info.episodes, self._info.frames)
        if actual != counted:
            raise UserError(
                f"{directory / self._layout.episodes} has {actual[0]} episodes with {actual[1]} frames, "
                f"{form.INFO} says {counted[0]} with {counted[1]}: the recording was not finished, or not copied whole"
            )
        for path in sorted(
            {
                *self._rows_of,
                *(self._layout.path(row, key) for row in self._rows for key in self._info.videos),
            }
        ):
            if not path.exists():
                raise UserError(f"{path} is missing: copy the dataset again")

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def cameras(self) -> dict[str, Feature]:
        """Features that are colour images."""
        return {key: feature for key, feature in self.features.items() if feature.is_camera}

    @property
    def data_files(self) -> list[Path]:
        """The files that hold the columns of all episodes."""
        return sorted(self._rows_of)

    def listed(self) -> list[tuple[int, str]]:
        """Return the number of frames and the instruction of each episode."""
        return [
            (int(row["length"]), ", ".join(map(str, row.get("tasks") or []))) for row in self._rows
        ]

    def camera(self, name: str) -> str | None:
        """Return the camera called ``name``, with or without ``observation.images.``, or None."""
        return next((key for key in self.cameras if name in (key, form.short_name(key))), None)

    def feature(self, key: str) -> Feature:
        """Return a feature. Raises UserError if there is none of this name."""
        if key not in self.features:
            names = ", ".join(key for key in self.features if key not in form.INDICES)
            raise UserError(f"{self.directory} has no feature {key} (it has {names})")
        return self.features[key]

    def episode(self, number: int, columns: Sequence[str]) -> Episode:
        """Read an episode. Raises UserError for missing columns or frames and non-finite values."""
        for key in columns:
            self.feature(key)
        table = self._table(number, [*columns, *_INDICES])
        indices = {
            key: self._values(number, table, key, feature) for key, feature in _INDICES.items()
        }
        self._check_times(number, indices["timestamp"], indices["frame_index"])
        values = {key: self._values(number, table, key, self.features[key]) for key in columns}
        for key, column in values.items():
            if (frame := form.first_not_finite(column)) is not None:
                raise UserError(
                    f"{self.directory}: {key} is not finite in episode {number}, frame {frame}: leave that episode out"
                )
        instruction = [self._tasks.get(index) for index in indices["task_index"].tolist()]
        listed = self._rows[number].get("tasks")
        for index, task in zip(indices["task_index"].tolist(), instruction, strict=True):
            if task is None:
                raise UserError(
                    f"{self.directory / self._layout.tasks} has no task {index} of episode {number}: copy the dataset again"
                )
            if listed is not None and task not in listed:
                raise UserError(
                    f"{self.directory / self._layout.tasks}: task {index} of episode {number} is {task[:80]!r}, "
                    f"{self._layout.episodes} says {', '.join(map(str, listed))[:80]!r}: the two must agree"
                )
        return Episode(number, values, instruction, indices["timestamp"])  # type: ignore[arg-type]

    def _check_times(self, number: int, times: Column, frame_index: Column) -> None:
        """Raise UserError unless the frames are in their order, 1/fps apart, as lerobot demands."""
        where = f"{self._layout.path(self._rows[number], 'data')}"
        if not np.array_equal(frame_index, np.arange(len(times))):
            raise UserError(
                f"{where} does not hold the {len(times)} frames of episode {number} in their order: copy the dataset again"
            )
        rounding = TOLERANCE + 4 * float(np.finfo(np.float32).eps * np.abs(times).max())
        due = np.arange(1, len(times)) / self.fps
        wrong = ~(np.abs(np.diff(times) - 1 / self.fps) <= rounding)  # also true of NaN
        wrong |= np.abs(times[1:] - times[0] - due) > rounding + 0.01 * due
        if wrong.any():
            row = int(wrong.argmax()) + 1
            raise UserError(
                f"{where}: frame {row} of episode {number} is {times[row] - times[row - 1]:.4f} s after the one before, "
                f"{form.INFO} says {self.fps:g} frames per second: correct fps, or record at a constant rate"
            )

    def frames(self, episode: Episode, camera: str, first: int = 0) -> Iterator[Frame]:
        """Yield a camera's images from frame ``first`` on, uint8 ``[H, W, 3]``.

        Raises UserError if one cannot be read.
        """
        feature = self.features[camera]
        row = self._rows[episode.number]
        size = feature.image_size
        if sorted(feature.shape) != sorted((*size, 3)):
            raise UserError(
                f"{self.directory}: {camera} has shape {list(feature.shape)}: images of red, green and blue are needed"
            )
        if feature.dtype == "video":
            begin, end = self._layout.part(row, camera)
            times = [begin + float(time) for time in episode.time]
            if times[0] < begin - TOLERANCE or times[-1] > end + TOLERANCE:
                raise UserError(
                    f"{self.directory / self._layout.episodes}: episode {episode.number} has frames from {times[0]:.4f} "
                    f"to {times[-1]:.4f} s of {camera}, its part of the video is {begin:.4f} to {end:.4f} s: copy the dataset again"
                )
            yield from read_frames(self._layout.path(row, camera), times[first:], size)
            return
        for index, stored in enumerate(
            self._table(episode.number, [camera]).column(camera)[first:], first
        ):
            try:
                yield picture(stored.as_py(), size)
            except ValueError as error:
                raise UserError(
                    f"{self._layout.path(row, 'data')}: {camera} of episode {episode.number}, frame {index}, {error}"
                ) from None

    def _table(self, number: int, columns: list[str]) -> pa.Table:
        """Return these columns of an episode, with all frames in order of the file."""
        row = self._rows[number]
        path = self._layout.path(row, "data")
        for key in {*columns, "episode_index"} - self._checked[path]:
            self._check_column(path, key)
            self._checked[path].add(key)
        table = read_table(path, columns, [("episode_index", "=", number)])
        if len(table) != row["length"]:
            raise UserError(
                f"{path} does not hold the {row['length']} frames of episode {number} in their order: copy the dataset again"
            )
        return table

    def _check_column(self, path: Path, key: str) -> None:
        """Raise UserError if a file lacks a column or holds more than ``meta/`` says."""
        metadata, schema = opened(path)
        if key not in schema.names:
            raise UserError(f"{path} has no column {key}, which {form.INFO} names")
        if metadata.num_rows > self._rows_of[path]:
            raise UserError(
                f"{path} has {metadata.num_rows} rows, {self._layout.episodes} says {self._rows_of[path]}: copy the dataset again"
            )
        feature = self.features.get(key) or form.INDICES[key]
        try:
            require_size(metadata, schema, key, feature)
        except ValueError as error:
            raise UserError(
                f"{path}: {key} is not {said(feature)}, as {form.INFO} says ({error})"
            ) from None

    def _values(self, number: int, table: pa.Table, key: str, feature: Feature) -> Column:
        """Return ``[L]`` for a scalar feature, else ``[L, *shape]``."""
        try:
            return values(table.column(key), feature)
        except ValueError as error:
            path = self._layout.path(self._rows[number], "data")
            raise UserError(
                f"{path}: {key} is not {said(feature)}, as {form.INFO} says (episode {number}: {error})"
            ) from None

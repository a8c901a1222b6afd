"""Find the episodes, instructions and files of a LeRobotDataset.

In v3.0 many episodes share a file, and the metadata are parquet files; in v2.0 and v2.1 an episode
has a file of its own, and the metadata are JSON lines.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.io import read_json_lines
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.lerobot_columns import read_table, values
from rlinf_vla.data.lerobot_format import Column, Feature
from rlinf_vla.data.lerobot_info import Info

WHOLE = Feature("int64", (1,))
SECONDS = Feature("float64", (1,))
TEXT = Feature("string", (1,))
_KINDS = {int: "a whole number", str: "a text", list: "a list"}
_MOST = 1 << 62
"""No larger whole number of JSON is read: Python refuses to print one of many digits."""
Row = dict[str, Any]
"""An episode: ``episode_index``, ``length``, ``tasks`` (instructions, or None) and its place."""


class SharedFiles:
    """The layout of v3.0."""

    tasks = form.TASKS
    episodes = form.EPISODES

    def __init__(self, directory: Path, info: Info) -> None:
        self.directory = directory
        self._info = info

    def texts(self) -> dict[int, str]:
        """Return the instructions by index. Raises UserError."""
        path = self.directory / self.tasks
        index, tasks = self._read_texts(path)
        if len(set(index)) < len(index):
            raise UserError(f"{path} has two tasks of one task_index: copy the dataset again")
        return dict(zip(index, tasks, strict=True))

    def rows(self) -> list[Row]:
        """Return the episodes in their order. Raises UserError."""
        rows = sorted(self._read_rows(), key=lambda row: int(row["episode_index"]))
        if [row["episode_index"] for row in rows] != list(range(len(rows))):
            raise UserError(
                f"{self.directory / self.episodes}: its episodes are not numbered 0 to {len(rows) - 1}: copy the dataset again"
            )
        return rows

    def path(self, row: Row, kind: str) -> Path:
        """Return the path of an episode's data (``kind="data"``) or of a camera's video."""
        template = self._info.data_path if kind == "data" else self._info.video_path
        path = Path(template.format(video_key=kind, **self._place(row, kind)))
        if path.is_absolute() or ".." in path.parts or path == Path():
            raise UserError(
                f"{self.directory / form.INFO}: {template!r} is not a path template inside the dataset"
            )
        return self.directory / path

    def part(self, row: Row, camera: str) -> tuple[float, float]:
        """Return the seconds of a camera's video from which and to which it shows an episode."""
        begin, end = (row[f"videos/{camera}/{name}_timestamp"] for name in ("from", "to"))
        return begin, end

    def _place(self, row: Row, kind: str) -> dict[str, int]:
        """Return the fields of a path template."""
        prefix = kind if kind == "data" else f"videos/{kind}"
        return {name: row[f"{prefix}/{name}"] for name in ("chunk_index", "file_index")}

    def _read_texts(self, path: Path) -> tuple[list[int], list[str]]:
        table = read_table(path)
        # pandas stores an unnamed index as __index_level_0__
        text = next(
            (name for name in ("task", "__index_level_0__") if name in table.column_names), None
        )
        if text is None or "task_index" not in table.column_names:
            raise UserError(f"{path} has columns {table.column_names}, not task_index and task")
        return (
            _column(path, table, "task_index", WHOLE).tolist(),
            _column(path, table, text, TEXT).tolist(),
        )

    def _read_rows(self) -> list[Row]:
        paths = sorted((self.directory / self.episodes).glob("*/*.parquet"))
        if not paths:
            raise UserError(
                f"{self.directory / self.episodes} holds no parquet file: the recording was not finished, or not copied whole"
            )
        kinds = {
            "episode_index": WHOLE,
            "length": WHOLE,
            "data/chunk_index": WHOLE,
            "data/file_index": WHOLE,
        }
        for key in self._info.videos:
            kinds |= {f"videos/{key}/{name}": WHOLE for name in ("chunk_index", "file_index")}
            kinds |= {
                f"videos/{key}/{name}": SECONDS for name in ("from_timestamp", "to_timestamp")
            }
        rows: list[Row] = []
        for path in paths:
            table = read_table(path, [*kinds, "tasks"], most=self._info.episodes)
            if missing := sorted(kinds.keys() - {*table.column_names}):
                raise UserError(
                    f"{path} lacks {missing[0]}: the recording was not finished, or not copied whole"
                )
            columns = {key: _column(path, table, key, kind) for key, kind in kinds.items()}
            for key, numbers in columns.items():
                if not (numbers >= (key == "length")).all():  # also false of NaN
                    row = int((~(numbers >= (key == "length"))).argmax())
                    _refuse(path, key, columns["episode_index"][row], numbers[row])
            tasks = (
                table.column("tasks").to_pylist()
                if "tasks" in table.column_names
                else [None] * len(table)
            )
            listed = {key: numbers.tolist() for key, numbers in columns.items()} | {"tasks": tasks}
            rows += [
                dict(zip(listed, row, strict=True)) for row in zip(*listed.values(), strict=True)
            ]
        return rows


class EpisodeFiles(SharedFiles):
    """The layout of v2.0 and v2.1, whose statistics (the only difference) are not read."""

    tasks = form.OLD_TASKS
    episodes = form.OLD_EPISODES

    def part(self, row: Row, camera: str) -> tuple[float, float]:
        return 0.0, math.inf

    def _place(self, row: Row, kind: str) -> dict[str, int]:
        number = row["episode_index"]
        return {"episode_index": number, "episode_chunk": number // self._info.chunks_size}

    def _read_texts(self, path: Path) -> tuple[list[int], list[str]]:
        lines = _lines(path, {"task_index": int, "task": str})
        return [line["task_index"] for line in lines], [line["task"] for line in lines]

    def _read_rows(self) -> list[Row]:
        path = self.directory / self.episodes
        rows = _lines(path, {"episode_index": int, "length": int, "tasks": list})
        for row in rows:
            for key in ("episode_index", "length"):
                if row[key] < (key == "length"):
                    _refuse(path, key, row["episode_index"], row[key])
        return rows


def layout_of(directory: Path, info: Info) -> SharedFiles:
    """Return the layout of a dataset's version."""
    return (EpisodeFiles if info.is_old else SharedFiles)(directory, info)


def said(feature: Feature) -> str:
    """Return what ``meta/info.json`` says of a feature, for a message."""
    return f"{feature.dtype} {list(feature.shape)}"


def _lines(path: Path, kinds: dict[str, type]) -> list[Row]:
    """Return the lines of a file of v2, each with values of these types. Raises UserError."""
    try:
        lines = read_json_lines(path)
        json.dumps(lines, ensure_ascii=False).encode()  # an escape may stand for half a character
    except FileNotFoundError:
        raise UserError(f"{path} is missing: copy the dataset again") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): it was cut short or changed, copy the dataset again"
        ) from None
    for number, line in enumerate(lines, 1):
        for key, kind in kinds.items():
            value: Any = line.get(key) if isinstance(line, dict) else None
            if type(value) is not kind or (isinstance(value, int) and abs(value) > _MOST):
                raise UserError(
                    f"{path}: {key} of entry {number} is not {_KINDS[kind]}: copy the dataset again"
                )
    return lines


def _refuse(path: Path, key: str, episode: int, number: int) -> None:
    """Raise UserError for the length or the place of an episode."""
    what = "an episode has at least 1 frame" if key == "length" else "it cannot be negative"
    raise UserError(
        f"{path}: {key} of episode {episode} is {number}: {what}, leave that episode out"
    )


def _column(path: Path, table: pa.Table, name: str, feature: Feature) -> Column:
    try:
        return values(table.column(name), feature)
    except ValueError as error:
        raise UserError(
            f"{path}: {name} is not {said(feature)} ({error}): copy the dataset again"
        ) from None

"""Read the episodes of a LeRobotDataset for their pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlinf_vla.config.errors import UserError
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.lerobot_format import Feature, Frame
from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.telemetry.run_files import check_inside

PAGE = 200
"""Episodes on a page of the list."""


class Dataset:
    """A dataset and the pages about it."""

    def __init__(self, directory: Path) -> None:
        """Raise UserError if it cannot be read, or if a file of it is a link to elsewhere."""
        for path in (
            path for name in ("meta", "data", "videos") for path in (directory / name).rglob("*")
        ):
            try:
                check_inside(directory, path)
            except ValueError as error:
                raise UserError(f"{path}: {error}") from None
        self.name = directory.resolve().name
        self.reader = LeRobotReader(directory)
        self.cameras = list(self.reader.cameras)

    def listed(self, page: str) -> dict[str, Any]:
        """Return what ``episodes.html`` shows. ``page``: from 1."""
        episodes = self.reader.listed()
        pages = -(-len(episodes) // PAGE)
        current = min(max(int(page) if page.isdecimal() and len(page) < 9 else 1, 1), pages)
        first = (current - 1) * PAGE
        rows = [
            (number, task, length, f"{length / self.reader.fps:.1f}")
            for number, (length, task) in enumerate(episodes[first : first + PAGE], first)
        ]
        frames = sum(length for length, _ in episodes)
        facts = [
            f"{len(episodes):,} episodes, {frames:,} frames at {self.reader.fps:g} per second ({frames / self.reader.fps / 60:.1f} min)"
        ]
        facts += (
            [f"cameras: {', '.join(map(form.short_name, self.cameras))}"] if self.cameras else []
        )
        features = [
            (key, f"{feature.dtype} {list(feature.shape)}")
            for key, feature in self.reader.features.items()
        ]
        return self._head("Dataset", self.name, facts) | {
            "rows": rows,
            "features": features,
            "page": current,
            "pages": pages,
            "data": {},
        }

    def episode(self, number: int) -> dict[str, Any]:
        """Return what ``episode.html`` shows. Raises UserError."""
        self._require(number)
        time = (episode := self.reader.episode(number, [])).time
        instruction = episode.instruction
        seconds = (time - time[0]).astype(float).round(4).tolist()
        curves, problems = [], []
        for key, feature in self.reader.features.items():
            if (
                key in form.INDICES
                or len(feature.shape) != 1
                or feature.dtype in ("string", "image", "video")
            ):
                continue
            try:
                values = (
                    self.reader.episode(number, [key])
                    .columns[key]
                    .reshape(len(time), -1)
                    .astype(float)
                )
            except UserError as error:
                problems.append(str(error))
                continue
            lines = {
                name: values[:, index].tolist() for index, name in enumerate(_names(key, feature))
            }
            curves.append({"title": key, "x": seconds, "lines": lines, "dots": []})
        data = {
            "x": "seconds",
            "curves": sorted(
                curves, key=lambda curve: curve["title"] not in (form.STATE, form.ACTION)
            ),
            "main": len(curves),
            "frames": {
                "number": number,
                "fps": self.reader.fps,
                "count": len(time),
                "cameras": [form.short_name(camera) for camera in self.cameras],
            },
        }
        facts = [
            ", ".join(dict.fromkeys(instruction)),
            f"{len(time)} frames, {len(time) / self.reader.fps:.1f} s",
            *problems,
        ]
        around = {"number": number, "last": len(self.reader) - 1}
        return (
            self._head("Episode", f"{self.name}, episode {number}", facts) | around | {"data": data}
        )

    def frame(self, number: int, camera: int, index: int) -> Frame:
        """Return one image of an episode. Raises UserError if there is none."""
        self._require(number)
        episode = self.reader.episode(number, [])
        if camera >= len(self.cameras) or index >= len(episode):
            raise UserError(f"episode {number} has no camera {camera}, or no frame {index}")
        return next(self.reader.frames(episode, self.cameras[camera], index))

    def _require(self, number: int) -> None:
        if number >= len(self.reader):
            raise UserError(f"there is no episode {number}: the last one is {len(self.reader) - 1}")

    def _head(self, kind: str, name: str, lines: list[str]) -> dict[str, Any]:
        return {"kind": kind, "name": name, "header": lines}


def _names(key: str, feature: Feature) -> list[str]:
    """Return a name of each value; LeRobot's tools also write a mapping with one list of names."""
    names: Any = feature.names
    if isinstance(names, dict):
        names = next((value for value in names.values() if isinstance(value, list)), None)
    count = int(np.prod(feature.shape))
    if isinstance(names, list) and len(set(map(str, names))) == count:
        return [str(name) for name in names]
    return [str(index) for index in range(count)] if count > 1 else [key]

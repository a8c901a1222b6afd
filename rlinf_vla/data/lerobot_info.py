"""Read and check ``meta/info.json`` of a LeRobotDataset."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.io import read_json
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.lerobot_format import Feature

_FIELD = re.compile(r"{video_key}|{(chunk_index|file_index)(:0?\d?d)?}")
_OLD_FIELD = re.compile(r"{video_key}|{(episode_chunk|episode_index)(:0?\d?d)?}")
"""A field of a path template; a format with a width of many digits would fill the memory."""
_LONGEST = 255
"""Characters of a path template or the name of a feature."""


@dataclass(frozen=True)
class Info:
    """What the reader uses of ``meta/info.json``. ``chunks_size``: episodes in a folder of v2."""

    version: str
    fps: float
    features: dict[str, Feature]
    data_path: str
    video_path: str
    episodes: int
    frames: int
    chunks_size: int

    @property
    def videos(self) -> list[str]:
        """Names of the cameras that are video files."""
        return [
            key
            for key, feature in self.features.items()
            if feature.is_camera and feature.dtype == "video"
        ]

    @property
    def is_old(self) -> bool:
        """Whether the layout is that of v2.0 and v2.1."""
        return self.version in form.OLD_VERSIONS


def read_info(directory: Path) -> Info:
    """Return what the file of a dataset says, and print the keys that the reader does not know.

    Raises UserError if it is missing, damaged or of another version.
    """
    info = _info(directory)
    try:
        fps = _number(info["fps"])
        features = {_name(key): _feature(feature, fps) for key, feature in info["features"].items()}
        version = info["codebase_version"]
        field = _OLD_FIELD if version in form.OLD_VERSIONS else _FIELD
        result = Info(
            version,
            fps,
            features,
            _template(info["data_path"], field),
            _template(info.get("video_path") or "", field),
            int(_number(info["total_episodes"])),
            int(_number(info["total_frames"])),
            int(_number(info.get("chunks_size", form.CHUNKS_SIZE))),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{directory / form.INFO} is not a valid LeRobotDataset info file ({type(error).__name__}: {error})"
        ) from None
    _list_unknown(directory / form.INFO, info)
    return result


def _info(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory: name one that holds a LeRobotDataset")
    path = directory / form.INFO
    if not path.exists():
        begun = any((directory / name).exists() for name in ("data", "meta", "videos"))
        wrong = "its recording was never finished" if begun else "it is no LeRobotDataset"
        raise UserError(f"{directory} has no {form.INFO}: {wrong}")
    try:
        info: dict[str, Any] = read_json(path)
        version = str(info["codebase_version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}): copy the dataset again"
        ) from None
    if version not in form.OLD_VERSIONS and not version.startswith("v3."):
        raise UserError(
            f"{directory} is a LeRobotDataset {version}, only {', '.join(form.OLD_VERSIONS)} and {form.VERSION} can be read"
        )
    return info


def _number(value: Any) -> float:
    """Return a positive number of ``meta/info.json``. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise ValueError(f"{str(value)[:40]!r} is not a positive number")
    return float(value)


def _name(text: Any) -> str:
    """Return the name of a feature, or the template of a path. Raises ValueError."""
    if not isinstance(text, str) or len(text) > _LONGEST or not text.isprintable():
        raise ValueError(f"{str(text)[:40]!r} is not a name")
    return text


def _template(text: Any, field: re.Pattern[str]) -> str:
    if any(mark in field.sub("", _name(text)) for mark in "{}"):
        raise ValueError(f"{text!r} is not a path template inside the dataset")
    return _name(text)


def _feature(described: Mapping[str, Any], fps: float) -> Feature:
    """Return one of ``features``. Raises ValueError, KeyError, TypeError or AttributeError."""
    info = described.get("info") or described.get("video_info") or {}
    shape = described["shape"]
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {str(shape)[:40]} is not a list of sizes")
    for rate in (described.get("fps"), info.get("video.fps")):
        if rate is not None and abs(_number(rate) - fps) > 0.01 * fps:
            raise ValueError(f"a feature has {rate:g} frames per second, the dataset {fps:g}")
    return Feature(_name(described["dtype"]), tuple(shape) or (1,), described.get("names"), info)


@cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr)


def _list_unknown(path: Path, info: Mapping[str, Any]) -> None:
    """Print the keys of ``meta/info.json`` that the reader does not know, once."""
    features = info["features"].values()
    keys_by_part = {form.INFO: info, "a feature": {key for feature in features for key in feature}}
    keys_by_part["info of a feature"] = {
        key
        for feature in features
        for key in feature.get("info") or feature.get("video_info") or {}
    }
    for part, keys in keys_by_part.items():
        patterns = (*form.READ.get(part, ()), *form.UNUSED.get(part, ()))
        if unknown := sorted(
            key for key in keys if not any(fnmatchcase(key, pattern) for pattern in patterns)
        ):
            _say_once(
                f"{path}: {part} has {', '.join(unknown)[:200]}, which rlinf-vla does not know and leaves unused"
            )

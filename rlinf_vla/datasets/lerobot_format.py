"""What a LeRobotDataset v3.0 directory holds: names of files and features, and their types in Arrow.

After huggingface/lerobot 0.6.1 (``lerobot/datasets/utils.py``, ``feature_utils.py``) and what it records. Many episodes share a file;
``meta/episodes`` says which file an episode lies in, and where.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlinf_vla.protocols import ImageSize

VERSION = "v3.0"
INFO, STATS, TASKS, EPISODES = "meta/info.json", "meta/stats.json", "meta/tasks.parquet", "meta/episodes"
_NUMBERED = "chunk-{chunk_index:03d}/file-{file_index:03d}"
EPISODES_PATH = f"{EPISODES}/{_NUMBERED}.parquet"
DATA_PATH = f"data/{_NUMBERED}.parquet"
VIDEO_PATH = f"videos/{{video_key}}/{_NUMBERED}.mp4"

STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."
REWARD, DONE, TRUNCATED, SUCCESS = "next.reward", "next.done", "next.truncated", "next.success"
"""What came of the action of a frame."""

CHUNKS_SIZE = 1000
"""Files per folder."""
DATA_FILE_MB, VIDEO_FILE_MB = 100, 200
"""Sizes that no file passes."""
MEGABYTE = 1 << 20

Column = NDArray[Any]
"""A feature of consecutive frames, ``[L, *shape]``."""
Frame = NDArray[np.uint8]
"""uint8 ``[H, W, 3]``, RGB."""


@dataclass(frozen=True)
class Feature:
    """One entry of ``features`` in ``meta/info.json``.

    dtype: of numpy, or ``string``; ``image`` (PNG in the parquet files) and ``video`` (in mp4 files of their own) for cameras.
    """

    dtype: str
    shape: tuple[int, ...]
    names: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def camera(cls, size: ImageSize, video: bool) -> Feature:
        return cls("video" if video else "image", (*size, 3), ["height", "width", "channels"])

    @property
    def is_camera(self) -> bool:
        """In colours; a depth map is none."""
        depth = self.info.get("is_depth_map") or self.info.get("video.is_depth_map")
        return self.dtype in ("image", "video") and len(self.shape) == 3 and not depth

    @property
    def image_size(self) -> ImageSize:
        """Of a camera; some datasets say ``[3, H, W]``."""
        first = str(self.names[0]) if isinstance(self.names, list) and self.names else ""
        height, width = self.shape[1:] if first.startswith("channel") else self.shape[:2]
        return height, width

    def as_json(self) -> dict[str, Any]:
        described = {"dtype": self.dtype, "shape": list(self.shape), "names": self.names}
        return described | ({"info": dict(self.info)} if self.info else {})


INDICES = {
    "timestamp": Feature("float32", (1,)),
    "frame_index": Feature("int64", (1,)),
    "episode_index": Feature("int64", (1,)),
    "index": Feature("int64", (1,)),
    "task_index": Feature("int64", (1,)),
}
"""Features that every dataset has: seconds and frames since the beginning of the episode, which episode, frame and task of the dataset."""


def first_not_finite(values: Column) -> int | None:
    """The first frame with a number that is none; None where all are finite."""
    if values.dtype.kind != "f":
        return None
    finite = np.isfinite(values.reshape(len(values), -1)).all(1)
    return None if finite.all() else int(finite.argmin())


def short_name(key: str) -> str:
    """What a camera is called: ``front`` of ``observation.images.front``."""
    return key.removeprefix(IMAGES).removeprefix("observation.")


def place(number: int) -> dict[str, int]:
    """Where file ``number`` lies."""
    chunk, file = divmod(number, CHUNKS_SIZE)
    return {"chunk_index": chunk, "file_index": file}


def data_schema(features: Mapping[str, Feature]) -> pa.Schema:
    """Of the parquet files in ``data/``, with the types by which Hugging Face's ``datasets`` (and so lerobot) knows them."""
    columns = {key: feature for key, feature in features.items() if feature.dtype != "video"}
    described = {"info": {"features": {key: _hugging_face(feature) for key, feature in columns.items()}}}
    return pa.schema([(key, _arrow(feature)) for key, feature in columns.items()], {"huggingface": json.dumps(described)})


def _arrow(feature: Feature) -> pa.DataType:
    if feature.dtype == "image":
        return pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    value = pa.string() if feature.dtype == "string" else pa.from_numpy_dtype(np.dtype(feature.dtype))
    return value if feature.shape == (1,) else pa.list_(value, feature.shape[0])


def _hugging_face(feature: Feature) -> dict[str, Any]:
    if feature.dtype == "image":
        return {"_type": "Image"}
    value = {"dtype": feature.dtype, "_type": "Value"}
    return value if feature.shape == (1,) else {"feature": value, "length": feature.shape[0], "_type": "List"}


def tasks_table(tasks: list[str]) -> pa.Table:
    """Of ``meta/tasks.parquet``: pandas, with which lerobot reads it, must find the tasks in its index."""
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
        for name, kind, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    described = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
    schema = pa.schema([("task_index", pa.int64()), ("task", pa.string())], {"pandas": json.dumps(described)})
    return pa.table({"task_index": list(range(len(tasks))), "task": tasks}, schema)

"""Define the LeRobotDataset layout: names of files and features, and their Arrow types.

v3.0: after huggingface/lerobot 0.6.1 (``lerobot/datasets/utils.py``, ``feature_utils.py``) and
datasets recorded with it. Many episodes share a file; ``meta/episodes`` lists the file and place of
each. v2.0 and v2.1, which are only read: after ``lerobot/common/datasets/utils.py`` of lerobot 0.1
and ``convert_dataset_v21_to_v30.py`` of 0.4. An episode has a file of its own, and the metadata are
JSON lines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlinf_vla.core.observation_features import require_colours
from rlinf_vla.core.protocols import EnvSpec, ImageSize

VERSION = "v3.0"
INFO = "meta/info.json"
STATS = "meta/stats.json"
TASKS = "meta/tasks.parquet"
EPISODES = "meta/episodes"
_NUMBERED = "chunk-{chunk_index:03d}/file-{file_index:03d}"
EPISODES_PATH = f"{EPISODES}/{_NUMBERED}.parquet"
DATA_PATH = f"data/{_NUMBERED}.parquet"
VIDEO_PATH = f"videos/{{video_key}}/{_NUMBERED}.mp4"
OLD_VERSIONS = ("v2.0", "v2.1")
OLD_TASKS = "meta/tasks.jsonl"
OLD_EPISODES = "meta/episodes.jsonl"
OLD_EPISODES_STATS = "meta/episodes_stats.jsonl"
OLD_DATA_PATH = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
OLD_VIDEO_PATH = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"

READ = {
    INFO: (
        "codebase_version",
        "fps",
        "total_episodes",
        "total_frames",
        "data_path",
        "video_path",
        "features",
        "chunks_size",
    ),
    "a feature": ("dtype", "shape", "names", "fps", "info", "video_info"),
    "info of a feature": ("is_depth_map", "video.is_depth_map", "video.fps"),
    EPISODES: (
        "episode_index",
        "length",
        "tasks",
        "data/*_index",
        "videos/*/*_index",
        "videos/*/from_timestamp",
        "videos/*/to_timestamp",
    ),
    TASKS: ("task_index", "task", "__index_level_0__"),
    OLD_EPISODES: ("episode_index", "length", "tasks"),
    OLD_TASKS: ("task_index", "task"),
    "data": ("timestamp", "frame_index", "episode_index", "task_index"),
}
"""What the reader uses of each file; patterns of ``fnmatch``."""
UNUSED = {
    INFO: (
        "robot_type",
        "total_tasks",
        "total_chunks",
        "total_videos",
        "*_files_size_in_mb",
        "splits",
        "cameras",
    ),
    "info of a feature": ("video.*", "audio.*", "has_audio"),
    EPISODES: ("dataset_from_index", "dataset_to_index", "stats/*", "meta/episodes/*"),
    "data": ("index",),
    STATS: ("*",),
    OLD_EPISODES_STATS: ("*",),
}
"""What changes nothing here: other tools' settings, places that follow from the lengths, and
statistics, because a policy has those of its checkpoint. Keys in neither list are named once."""

STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."
REWARD = "next.reward"
DONE = "next.done"
TRUNCATED = "next.truncated"
SUCCESS = "next.success"
"""Features with the outcome of a frame's action."""

CHUNKS_SIZE = 1000
"""Files per folder."""
DATA_FILE_MB, VIDEO_FILE_MB = 100, 200
"""Maximum file sizes in MB."""
MEGABYTE = 1 << 20

Column = NDArray[Any]
"""Values of a feature over consecutive frames, ``[L, *shape]``."""
Frame = NDArray[np.uint8]
"""uint8 ``[H, W, 3]``, RGB."""


@dataclass(frozen=True)
class Feature:
    """One entry of ``features`` in ``meta/info.json``.

    dtype: of numpy, or ``string``; for cameras ``image`` (PNG in parquet) or ``video`` (mp4 files).
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
        """Whether this is a colour image; a depth map is not a camera."""
        depth = self.info.get("is_depth_map") or self.info.get("video.is_depth_map")
        return self.dtype in ("image", "video") and len(self.shape) == 3 and not depth

    @property
    def image_size(self) -> ImageSize:
        """(height, width) of a camera; some datasets store the shape as ``[3, H, W]``."""
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
"""Features of every dataset: seconds and frames since the episode's start; dataset-wide indices."""


def recorded_features(
    spec: EnvSpec, video: bool, more: Mapping[str, Feature] | None = None
) -> dict[str, Feature]:
    """Return state, action, ``more``, outcome and cameras; ``video``: cameras are not images.

    Raises UserError for a camera that shows no colours.
    """
    require_colours(spec.images, "a LeRobotDataset written here")
    scalar, flag = Feature("float32", (1,)), Feature("bool", (1,))
    features = {
        STATE: Feature("float32", (spec.state_dim,)),
        ACTION: Feature("float32", (spec.action_dim,)),
        **(more or {}),
    }
    features |= {REWARD: scalar, DONE: flag, TRUNCATED: flag, SUCCESS: flag}
    return features | {
        IMAGES + name: Feature.camera(size, video) for name, size in spec.images.items()
    }


def first_not_finite(values: Column) -> int | None:
    """Return the first frame with NaN or infinity; None if all values are finite."""
    if values.dtype.kind != "f":
        return None
    finite = np.isfinite(values.reshape(len(values), -1)).all(1)
    return None if finite.all() else int(finite.argmin())


def short_name(key: str) -> str:
    """Return a camera's short name: ``front`` for ``observation.images.front``."""
    return key.removeprefix(IMAGES).removeprefix("observation.")


def place(number: int) -> dict[str, int]:
    """Return chunk and file index of file ``number``."""
    chunk, file = divmod(number, CHUNKS_SIZE)
    return {"chunk_index": chunk, "file_index": file}


def data_schema(features: Mapping[str, Feature]) -> pa.Schema:
    """Return the Arrow schema of ``data/``, with metadata for Hugging Face ``datasets``."""
    columns = {key: feature for key, feature in features.items() if feature.dtype != "video"}
    described = {
        "info": {"features": {key: _hugging_face(feature) for key, feature in columns.items()}}
    }
    return pa.schema(
        [(key, _arrow(feature)) for key, feature in columns.items()],
        {"huggingface": json.dumps(described)},
    )


def _arrow(feature: Feature) -> pa.DataType:
    if feature.dtype == "image":
        return pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    value = (
        pa.string() if feature.dtype == "string" else pa.from_numpy_dtype(np.dtype(feature.dtype))
    )
    return value if feature.shape == (1,) else pa.list_(value, feature.shape[0])


def _hugging_face(feature: Feature) -> dict[str, Any]:
    if feature.dtype == "image":
        return {"_type": "Image"}
    value = {"dtype": feature.dtype, "_type": "Value"}
    return (
        value
        if feature.shape == (1,)
        else {"feature": value, "length": feature.shape[0], "_type": "List"}
    )


def tasks_table(tasks: list[str]) -> pa.Table:
    """Return ``meta/tasks.parquet``, which lerobot reads with pandas, with tasks as index."""
    columns = [
        {
            "name": name,
            "field_name": name,
            "pandas_type": kind,
            "numpy_type": numpy,
            "metadata": None,
        }
        for name, kind, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    described = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": columns,
        "pandas_version": "2.0.0",
    }
    schema = pa.schema(
        [("task_index", pa.int64()), ("task", pa.string())], {"pandas": json.dumps(described)}
    )
    return pa.table({"task_index": list(range(len(tasks))), "task": tasks}, schema)

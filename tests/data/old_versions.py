"""Rewrite a dataset as the older versions of LeRobot have it.

Written after lerobot 0.1 and 0.3.3 (``datasets/utils.py``), independently of the reader.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

V20, V21 = "v2.0", "v2.1"
CHUNKS_SIZE = 2
"""Episodes in a folder: so few that a small dataset has several."""


def rewrite(source: Path, target: Path, version: str) -> None:
    """Write the v3.0 dataset ``source``, whose videos have one episode each, as ``version``."""
    info = json.loads((source / "meta/info.json").read_text())
    table = pq.read_table(source / "meta/episodes")
    tasks = pq.read_table(source / "meta/tasks.parquet").to_pylist()
    frames = pq.read_table(source / "data")
    videos = [key for key, feature in info["features"].items() if feature["dtype"] == "video"]
    (target / "meta").mkdir(parents=True)
    episodes, statistics = [], []
    for row in table.to_pylist():
        number = row["episode_index"]
        chunk, name = f"chunk-{number // CHUNKS_SIZE:03d}", f"episode_{number:06d}"
        (target / "data" / chunk).mkdir(parents=True, exist_ok=True)
        rows = [
            index for index, each in enumerate(frames["episode_index"]) if each.as_py() == number
        ]
        pq.write_table(frames.take(rows), target / "data" / chunk / f"{name}.parquet")
        for key in videos:
            assert row[f"videos/{key}/from_timestamp"] == 0
            place = [row[f"videos/{key}/{each}_index"] for each in ("chunk", "file")]
            (target / "videos" / chunk / key).mkdir(parents=True, exist_ok=True)
            shutil.copy(
                source / f"videos/{key}/chunk-{place[0]:03d}/file-{place[1]:03d}.mp4",
                target / "videos" / chunk / key / f"{name}.mp4",
            )
        episodes.append({key: row[key] for key in ("episode_index", "tasks", "length")})
        statistics.append({"episode_index": number, "stats": _statistics(row)})
    write_lines(target / "meta/episodes.jsonl", episodes)
    write_lines(target / "meta/tasks.jsonl", tasks)
    if version == V21:
        write_lines(target / "meta/episodes_stats.jsonl", statistics)
    else:
        shutil.copy(source / "meta/stats.json", target / "meta/stats.json")
    for key in ("data_files_size_in_mb", "video_files_size_in_mb"):
        del info[key]
    data = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    video = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    info |= {
        "codebase_version": version,
        "total_videos": len(videos) * len(episodes),
        "total_chunks": -(-len(episodes) // CHUNKS_SIZE),
        "chunks_size": CHUNKS_SIZE,
        "data_path": data,
        "video_path": video if videos else None,
    }
    (target / "meta/info.json").write_text(json.dumps(info, indent=4))


def write_lines(path: Path, values: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def _statistics(row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, value in row.items():
        if name.startswith("stats/"):
            _, key, statistic = name.split("/")
            found.setdefault(key, {})[statistic] = value
    return found

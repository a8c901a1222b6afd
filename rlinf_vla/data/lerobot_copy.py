"""Copy a LeRobotDataset with further features; videos and images stay as they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlinf_vla.core.io import read_json, read_json_lines, write_text
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.lerobot_format import Column, Feature
from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.data.lerobot_statistics import of_vectors

_DESCRIBED = b"huggingface"
"""Key of a parquet file's metadata with the features for Hugging Face ``datasets``."""


def copy_with_features(
    reader: LeRobotReader,
    target: Path,
    features: Mapping[str, Feature],
    episodes: Sequence[Mapping[str, Column]],
) -> None:
    """Copy the dataset into the empty directory ``target``, with ``features`` of one number.

    ``episodes``: the values ``[L]`` of each feature, by episode. Features of the same names are
    replaced.
    """
    data = set(reader.data_files)

    def ignore(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if Path(folder) / name in data}

    shutil.copytree(reader.directory, target, ignore=ignore, dirs_exist_ok=True)
    whole = {key: np.concatenate([episode[key] for episode in episodes]) for key in features}
    lengths = [len(next(iter(episode.values()))) for episode in episodes]
    first = np.cumsum([0, *lengths[:-1]])
    for path in data:
        copy = target / path.relative_to(reader.directory)
        copy.parent.mkdir(parents=True, exist_ok=True)
        table = pq.read_table(path)
        rows = first[table["episode_index"].to_numpy()] + table["frame_index"].to_numpy()
        columns = {key: values[rows] for key, values in whole.items()}
        pq.write_table(_extended(table, features, columns), copy)
    info = read_json(reader.directory / form.INFO)
    info["features"] |= {key: feature.as_json() for key, feature in features.items()}
    if (target / form.STATS).exists():
        statistics = read_json(target / form.STATS)
        statistics |= {key: of_vectors(values) for key, values in whole.items()}
        write_text(target / form.STATS, json.dumps(statistics, indent=4))
    if (target / form.OLD_EPISODES_STATS).exists():
        lines = read_json_lines(target / form.OLD_EPISODES_STATS)
        for line in lines:
            episode = episodes[line["episode_index"]]
            line["stats"] |= {key: of_vectors(episode[key]) for key in features}
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_text(target / form.OLD_EPISODES_STATS, text)
    write_text(target / form.INFO, json.dumps(info, indent=4))


def _extended(
    table: pa.Table, features: Mapping[str, Feature], columns: Mapping[str, Column]
) -> pa.Table:
    """Return a data file's table with ``columns``, the values of ``features`` by row."""
    described = json.loads((table.schema.metadata or {}).get(_DESCRIBED, b"{}"))
    table = table.drop_columns([key for key in features if key in table.column_names])
    for key in features:
        table = table.append_column(key, pa.array(columns[key]))
    if "features" in described.get("info", {}):
        added = json.loads(form.data_schema(features).metadata[_DESCRIBED])
        described["info"]["features"] |= added["info"]["features"]
    metadata = (table.schema.metadata or {}) | {_DESCRIBED: json.dumps(described).encode()}
    return table.replace_schema_metadata(metadata)

"""LeRobotDatasets v2.0 and v2.1 have the episodes of the same dataset in v3.0."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.algorithms.sac import SACConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.data.from_dataset import dataset_transitions
from rlinf_vla.data.lerobot_format import ACTION, READ, REWARD, STATE, UNUSED
from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.rollout.demonstrations import collect_demonstrations
from tests.data import test_from_dataset as worlds
from tests.data.changed import changed_bytes
from tests.data.episodes import FRONT, write
from tests.data.old_versions import V20, V21, rewrite
from tests.data.test_lerobot_reader import (
    at,
    cut,
    edit_info,
    edit_table,
    read_all,
    with_column,
)

DATA = "data/chunk-000/episode_000001.parquet"
VIDEO = f"videos/chunk-001/{FRONT}/episode_000002.mp4"
EPISODES, TASKS = "meta/episodes.jsonl", "meta/tasks.jsonl"


@pytest.fixture(autouse=True)
def one_episode_per_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_vla.data.lerobot_format.VIDEO_FILE_MB", 0)


def old(directory: Path, version: str = V21, video: bool = False) -> Path:
    """A dataset of three episodes, of 5, 3 and 7 frames."""
    write(directory / "new", video=video)
    rewrite(directory / "new", directory / "old", version)
    return directory / "old"


@pytest.mark.parametrize("version", [V20, V21])
@pytest.mark.parametrize("video", [False, True])
def test_the_episodes_are_those_of_version_3(
    tmp_path: Path, version: str, video: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    found, wanted = (
        LeRobotReader(each) for each in (old(tmp_path, version, video), tmp_path / "new")
    )
    assert found.listed() == wanted.listed() and found.fps == wanted.fps
    for number in range(3):
        columns = [STATE, ACTION, REWARD]
        one, other = found.episode(number, columns), wanted.episode(number, columns)
        assert one.instruction == other.instruction and np.array_equal(one.time, other.time)
        for key in columns:
            assert np.array_equal(one.columns[key], other.columns[key])
        for camera in found.cameras:
            for frame, same in zip(
                found.frames(one, camera, 1), wanted.frames(other, camera, 1), strict=True
            ):
                assert np.array_equal(frame, same)
    assert capsys.readouterr().err == "", "every key is known"


@pytest.mark.parametrize("version", [V20, V21])
def test_demonstrations_and_transitions_are_those_of_version_3(
    tmp_path: Path, version: str
) -> None:
    worlds.write(tmp_path / "new", worlds.played())
    rewrite(tmp_path / "new", tmp_path / "old", version)
    policy = worlds.Sees(2)
    (one, success), (other, same) = (
        collect_demonstrations(policy, (), DemonstrationConfig(dataset=str(tmp_path / name)), 0)
        for name in ("old", "new")
    )
    assert success == same
    worlds.assert_equal(one, other)
    one_by_one, wanted = (
        list(dataset_transitions(policy, SACConfig(dataset=str(tmp_path / name))))
        for name in ("old", "new")
    )
    assert len(one_by_one) == len(wanted) == 9
    for episode, expected in zip(one_by_one, wanted, strict=True):
        assert episode.success == expected.success
        for key, value in expected.records.items():
            assert torch.equal(episode.records[key], value)


def test_every_key_of_the_metadata_is_listed(tmp_path: Path) -> None:
    directory = old(tmp_path)
    for path in (EPISODES, TASKS, "meta/episodes_stats.jsonl"):
        for line in (directory / path).read_text().splitlines():
            for key in json.loads(line):
                patterns = (*READ.get(path, ()), *UNUSED.get(path, ()))
                assert any(fnmatchcase(key, each) for each in patterns), (path, key)


def edit_lines(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("".join(line + "\n" for line in change(path.read_text().splitlines())))


def replaced(path: str, before: str, after: str) -> Callable[[Path], object]:
    """A change of the text of a file, which must have it."""

    def change(directory: Path) -> None:
        text = (directory / path).read_text()
        assert before in text
        (directory / path).write_text(text.replace(before, after))

    return change


ACCIDENTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another version": (
        lambda d: edit_info(d, codebase_version="v2.2"),
        "is a LeRobotDataset v2.2, only v2.0, v2.1 and v3.0 can be read",
    ),
    "the path of version 3": (
        lambda d: edit_info(
            d, data_path="data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
        ),
        "is not a path template inside the dataset",
    ),
    "another folder": (
        lambda d: edit_info(d, data_path="../{episode_index}"),
        "is not a path template inside the dataset",
    ),
    "no chunks": (lambda d: edit_info(d, chunks_size=0), "'0' is not a positive number"),
    "no episodes": (lambda d: (d / EPISODES).unlink(), "episodes.jsonl is missing"),
    "no tasks": (lambda d: (d / TASKS).unlink(), "tasks.jsonl is missing: copy the dataset again"),
    "a folder of tasks": (
        lambda d: [(d / TASKS).unlink(), (d / TASKS).mkdir()],
        r"tasks.jsonl cannot be read \(it is no file\)",
    ),
    "half the episodes": (
        lambda d: cut(d / EPISODES, 0.5),
        r"episodes.jsonl cannot be read \(line 2: .*\): it was cut short or changed",
    ),
    "no UTF-8": (
        lambda d: (d / TASKS).write_bytes(b'{"task_index": 0, "task": "\xff"}'),
        r"tasks.jsonl cannot be read \('utf-8' codec",
    ),
    "half a character": (
        replaced(TASKS, "task 1", "\\ud800"),
        r"tasks.jsonl cannot be read \('utf-8' codec can't encode",
    ),
    "lists in lists": (
        lambda d: (d / TASKS).write_text("[" * 100_000),
        r"tasks.jsonl cannot be read \(line 1: it is nested too deeply",
    ),
    "a list": (
        lambda d: (d / EPISODES).write_text("[]\n"),
        "episode_index of entry 1 is not a whole number",
    ),
    "a length of a fraction": (
        replaced(EPISODES, '"length": 3', '"length": 3.0'),
        "episodes.jsonl: length of entry 2 is not a whole number",
    ),
    "a flag for a length": (
        replaced(EPISODES, '"length": 3', '"length": true'),
        "length of entry 2 is not a whole",
    ),
    "no frames": (
        replaced(EPISODES, '"length": 3', '"length": 0'),
        "length of episode 1 is 0: an episode has at least 1 frame",
    ),
    "a negative number": (
        replaced(EPISODES, '"episode_index": 1', '"episode_index": -1'),
        "episode_index of episode -1 is -1: it cannot be negative",
    ),
    "a huge number": (
        replaced(EPISODES, '"length": 3', f'"length": {10**30}'),
        "length of entry 2 is not a whole number",
    ),
    "an episode twice": (
        lambda d: edit_lines(d / EPISODES, lambda lines: [lines[0], lines[0], lines[2]]),
        "its episodes are not numbered 0 to 2",
    ),
    "an episode less": (
        lambda d: edit_lines(d / EPISODES, lambda lines: lines[:2]),
        "episodes.jsonl has 2 episodes with 8 frames, meta/info.json says 3 with 15",
    ),
    "a text for tasks": (
        replaced(EPISODES, '["task 1"]', '"task 1"'),
        "tasks of entry 2 is not a list",
    ),
    "two instructions": (
        replaced(TASKS, '"task_index": 1', '"task_index": 0'),
        "has two tasks of one task_index",
    ),
    "no instruction": (replaced(TASKS, '"task 1"', "null"), "task of entry 2 is not a text"),
    "another instruction": (
        replaced(EPISODES, "task 1", "task 0"),
        "tasks.jsonl: task 1 of episode 1 is 'task 1', meta/episodes.jsonl says 'task 0'",
    ),
    "a task less": (
        lambda d: edit_lines(d / TASKS, lambda lines: lines[:1]),
        "tasks.jsonl has no task 1 of episode 1",
    ),
    "no data of an episode": (
        lambda d: (d / DATA).unlink(),
        "episode_000001.parquet is missing: copy the dataset again",
    ),
    "no video of an episode": (
        lambda d: (d / VIDEO).unlink(),
        "episode_000002.mp4 is missing: copy the dataset again",
    ),
    "half the data": (
        lambda d: cut(d / DATA, 0.5),
        "episode_000001.parquet cannot be read .*: it was cut short",
    ),
    "more frames": (
        lambda d: edit_table(d / DATA, lambda t: pa.concat_tables([t, t])),
        "has 6 rows, meta/episodes.jsonl says 3: copy the dataset again",
    ),
    "fewer frames": (
        lambda d: edit_table(d / DATA, lambda t: t.slice(0, 2)),
        "does not hold the 3 frames of episode 1",
    ),
    "data of another episode": (
        lambda d: shutil.copy(d / "data/chunk-000/episode_000000.parquet", d / DATA),
        "has 5 rows, meta/episodes.jsonl says 3",
    ),
    "another shape": (
        lambda d: with_column(d / DATA, ACTION, at(1, [0.0]), pa.list_(pa.float32())),
        "episode 1: row 1 has 1 values where 2 belong",
    ),
    "a shorter video": (
        lambda d: shutil.copy(d / f"videos/chunk-000/{FRONT}/episode_000001.mp4", d / VIDEO),
        r"episode_000002.mp4 ends before 0\.3000 s",
    ),
}


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_a_damaged_dataset_is_one_line(tmp_path: Path, accident: str) -> None:
    happens, message = ACCIDENTS[accident]
    directory = old(tmp_path, video="video" in accident)
    happens(directory)
    with pytest.raises(UserError, match=message) as caught:
        read_all(directory)
    assert "\n" not in str(caught.value)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_changed_bytes_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    """For any flipped bytes in meta/ and data/, the reader returns a dataset or reports one line."""
    directory = tmp_path / "old"
    if not directory.exists():
        old(tmp_path)
    names = ("meta/info.json", EPISODES, TASKS, DATA)
    path = data.draw(st.sampled_from([directory / name for name in names]))
    try:
        with changed_bytes(path, data):
            read_all(directory)
    except UserError as error:
        assert "\n" not in str(error)

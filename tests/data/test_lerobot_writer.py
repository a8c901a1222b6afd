from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rlinf_vla.config.errors import UserError
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.lerobot_format import ACTION, STATE, Feature
from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.data.lerobot_writer import LeRobotWriter
from tests.data.episodes import FPS, FRONT, WRIST, episode, features, write

NUMBERS = [key for key, feature in features(False).items() if not feature.is_camera]


@pytest.mark.parametrize("video", [False, True])
def test_the_reader_returns_what_was_written(tmp_path: Path, video: bool) -> None:
    written = write(tmp_path / "data", video=video)
    reader = LeRobotReader(tmp_path / "data")
    assert len(reader) == 3 and reader.fps == FPS
    assert {key: feature.image_size for key, feature in reader.cameras.items()} == {
        FRONT: (32, 48),
        WRIST: (16, 16),
    }
    for number, truth in enumerate(written):
        found = reader.episode(number, NUMBERS)
        assert found.instruction == [f"task {number % 2}"] * len(found)
        assert found.time.tolist() == pytest.approx(
            [step / FPS for step in range(len(truth[ACTION]))]
        )
        for key in NUMBERS:
            assert found.columns[key].dtype == truth[key].dtype and np.array_equal(
                found.columns[key], truth[key]
            ), key
        for key in (FRONT, WRIST):
            frames = np.stack(list(reader.frames(found, key)))
            assert frames.dtype == np.uint8 and frames.shape == truth[key].shape
            difference = np.abs(frames.astype(int) - truth[key].astype(int)).max()
            assert difference == 0 or (video and difference < 12), (
                "the next frame is 37 levels away"
            )


@pytest.mark.parametrize("video", [False, True])
def test_files_and_folders_roll_over(
    tmp_path: Path, video: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form, "MEGABYTE", 25 if video else 100)
    monkeypatch.setattr(form, "CHUNKS_SIZE", 2)
    lengths = (40,) * 7
    written = write(tmp_path / "data", lengths, video)
    for folder in [tmp_path / "data/videos" / FRONT] if video else [tmp_path / "data/data"]:
        files = [
            str(path.relative_to(folder).with_suffix("")) for path in sorted(folder.glob("*/*"))
        ]
        assert files[:3] == ["chunk-000/file-000", "chunk-000/file-001", "chunk-001/file-000"]
        assert not video or len(files) < len(lengths), "several episodes share a file"
    reader = LeRobotReader(tmp_path / "data")
    for number in reversed(range(len(lengths))):
        found = reader.episode(number, [STATE])
        assert np.array_equal(found.columns[STATE], written[number][STATE])
        for frame, truth in zip(reader.frames(found, FRONT), written[number][FRONT], strict=True):
            assert abs(frame.mean() - truth.mean()) < 3


def test_each_frame_has_its_indices(tmp_path: Path) -> None:
    write(tmp_path / "data", (2, 3))
    table = pq.read_table(tmp_path / "data/data/chunk-000/file-000.parquet").to_pydict()
    assert table["episode_index"] == [0, 0, 1, 1, 1] and table["frame_index"] == [0, 1, 0, 1, 2]
    assert table["index"] == [0, 1, 2, 3, 4] and table["task_index"] == [0, 0, 1, 1, 1]
    rows = pq.read_table(tmp_path / "data/meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [
        (row["dataset_from_index"], row["dataset_to_index"], row["length"], row["tasks"])
        for row in rows
    ] == [
        (0, 2, 2, ["task 0"]),
        (2, 5, 3, ["task 1"]),
    ]
    info = json.loads((tmp_path / "data/meta/info.json").read_text())
    assert (
        info["codebase_version"] == "v3.0"
        and info["splits"] == {"train": "0:2"}
        and info["robot_type"] == "toy"
    )
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (2, 5, 2)


def test_the_geometry_of_cameras_is_kept(tmp_path: Path) -> None:
    known = {"observation.images.front": {"intrinsics": {"fx": 60.0}}}
    with LeRobotWriter(tmp_path / "data", FPS, features(False), cameras=known) as writer:
        writer.add_episode(episode(3, 0, video=False), "task")
    assert json.loads((tmp_path / "data/meta/info.json").read_text())["cameras"] == known
    assert len(LeRobotReader(tmp_path / "data")) == 1


def test_an_exception_leaves_no_files(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError),
        LeRobotWriter(tmp_path / "data", FPS, features(True)) as writer,
    ):
        writer.add_episode(episode(3, 0, video=True), "task")
        raise RuntimeError
    assert not (tmp_path / "data").exists()


def test_a_killed_process_leaves_no_dataset(tmp_path: Path) -> None:
    writer = LeRobotWriter(tmp_path / "data", FPS, features(True))
    writer.add_episode(episode(3, 0, video=True), "task")
    with pytest.raises(
        UserError, match=r"has no meta/info\.json: its recording was never finished"
    ):
        LeRobotReader(tmp_path / "data")
    with pytest.raises(UserError, match="is not empty"):
        LeRobotWriter(tmp_path / "data", FPS, features(True))
    writer.finalize()
    assert len(LeRobotReader(tmp_path / "data")) == 1


def test_without_an_episode_there_is_no_dataset(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="no episode was recorded"),
        LeRobotWriter(tmp_path / "data", FPS, features(False)),
    ):
        pass
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        (
            STATE,
            lambda x: x.astype(np.float64),
            r"observation.state is float64 \[4, 3\], the dataset wants float32 \[4, 3\]",
        ),
        (STATE, lambda x: x[:, :2], r"observation.state is float32 \[4, 2\]"),
        (ACTION, lambda x: x[:3], r"action is float32 \[3, 2\]"),
        (ACTION, lambda x: x * np.nan, "action is not finite at frame 0"),
        (
            FRONT,
            lambda x: x[:, :-1],
            r"observation.images.front is uint8 \[4, 31, 48, 3\], the dataset wants uint8 \[4, 32, 48, 3\]",
        ),
        (FRONT, lambda x: x / 255, "observation.images.front is float64"),
        (WRIST, None, "episode 0 has features"),
    ],
)
def test_an_episode_that_does_not_fit_is_refused_completely(
    tmp_path: Path, key: str, change: Any, message: str
) -> None:
    good = episode(4, 0)
    bad = {name: value for name, value in good.items() if name != key} | (
        {key: change(good[key])} if change else {}
    )
    with LeRobotWriter(tmp_path / "data", FPS, features(False)) as writer:
        with pytest.raises(UserError, match=message):
            writer.add_episode(bad, "task")
        with pytest.raises(UserError, match="at least 1 frame"):
            writer.add_episode({name: value[:0] for name, value in good.items()}, "task")
        writer.add_episode(good, "task")
    assert len(LeRobotReader(tmp_path / "data")) == 1


@pytest.mark.parametrize(
    ("fps", "key", "feature", "message"),
    [
        (12.5, STATE, Feature("float32", (3,)), "a whole number of frames per second, not 12.5"),
        (10, "next/reward", Feature("float32", (1,)), "its name has a slash"),
        (10, "index", Feature("int64", (1,)), "every dataset has it already"),
        (
            10,
            FRONT,
            Feature.camera((33, 32), video=True),
            r"video needs even sides, not \[33, 32, 3\]",
        ),
        (
            10,
            FRONT,
            Feature("image", (3, 32, 32), ["channels", "height", "width"]),
            r"images are \[height, width, 3\], not \[3, 32, 32\]",
        ),
        (10, STATE, Feature("float32", (3, 2)), "only scalars, vectors and RGB images"),
    ],
)
def test_an_invalid_dataset_is_refused_before_recording(
    tmp_path: Path, fps: float, key: str, feature: Feature, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        LeRobotWriter(tmp_path / "data", fps, {key: feature})
    assert not (tmp_path / "data").exists()

"""Datasets that real lerobot recorded (``fixtures/``), and damaged datasets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlinf_vla.config.errors import UserError
from rlinf_vla.data.lerobot_format import ACTION, DATA_PATH, DONE, REWARD, STATE, SUCCESS, place
from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.data.lerobot_video import read_frames
from tests.data import lerobot_peer
from tests.data.episodes import FRONT, WRIST, write

FIXTURES = Path(__file__).parent / "fixtures"
DATA = DATA_PATH.format(**place(0))
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
VIDEO = f"videos/{FRONT}/chunk-000/file-000.mp4"


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_dataset_recorded_by_lerobot(kind: str) -> None:
    reader = LeRobotReader(FIXTURES / kind)
    assert len(reader) == 3 and reader.fps == lerobot_peer.FPS and list(reader.cameras) == [FRONT, WRIST]
    for number, (length, task) in enumerate(zip(lerobot_peer.LENGTHS, lerobot_peer.TASKS, strict=True)):
        found = reader.episode(number, [STATE, ACTION, REWARD, DONE, SUCCESS])
        assert found.instruction == [task] * length and len(found) == length
        truth = [lerobot_peer.frame(number, step) for step in range(length)]
        for key, values in found.columns.items():
            expected = np.stack([each[key] for each in truth]).reshape(values.shape)
            assert values.dtype == expected.dtype and np.array_equal(values, expected), key
        for key in (FRONT, WRIST):
            frames = np.stack(list(reader.frames(found, key))).astype(int)
            expected = np.stack([each[key] for each in truth]).astype(int)
            if kind == "image":
                assert np.array_equal(frames, expected)
            else:
                assert np.abs(frames - expected).mean() < 6, "the next frame is 16 levels away"
                distance = np.abs(frames[:, None] - expected[None]).mean((2, 3, 4))
                assert distance.argmin(1).tolist() == list(range(length))


def test_cameras_are_found_by_either_name() -> None:
    reader = LeRobotReader(FIXTURES / "image")
    assert reader.camera("front") == reader.camera(FRONT) == FRONT and reader.camera("side") is None


def edit_info(directory: Path, **changes: object) -> None:
    path = directory / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_table(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def with_nan(table: pa.Table) -> pa.Table:
    rows = table.column(STATE).to_pylist()
    rows[6][1] = float("nan")
    return table.set_column(table.column_names.index(STATE), STATE, pa.array(rows, pa.list_(pa.float32(), 3)))


def without_features(directory: Path, *keys: str) -> None:
    info = json.loads((directory / "meta/info.json").read_text())
    edit_info(directory, features={key: value for key, value in info["features"].items() if key not in keys})


def read_all(directory: Path) -> None:
    reader = LeRobotReader(directory)
    for number in range(len(reader)):
        found = reader.episode(number, [STATE, ACTION, REWARD])
        for key in reader.cameras:
            for _ in reader.frames(found, key):
                pass


ACCIDENTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (shutil.rmtree, "is not a directory: name one that holds a LeRobotDataset"),
    "empty": (lambda d: [shutil.rmtree(d), d.mkdir()], r"has no meta/info\.json: it is no LeRobotDataset"),
    "no info": (lambda d: (d / "meta/info.json").unlink(), r"has no meta/info\.json: its recording was never finished"),
    "half an info": (lambda d: cut(d / "meta/info.json", 0.5), "info.json cannot be read"),
    "v2.1": (lambda d: edit_info(d, codebase_version="v2.1"), "is a LeRobotDataset v2.1, v3.0 is wanted: .*convert_dataset_v21_to_v30"),
    "v4": (lambda d: edit_info(d, codebase_version="v4.0"), "is a LeRobotDataset v4.0, only v3.0 can be read"),
    "no features": (lambda d: edit_info(d, features=None), "info.json is not a valid LeRobotDataset info file"),
    "fewer episodes": (lambda d: edit_info(d, total_episodes=9), "has 3 episodes with 15 frames, .* says 9 with 15"),
    "another folder": (lambda d: edit_info(d, data_path="../{chunk_index}/{file_index}"), "is not a path template inside the dataset"),
    "a wrong pattern": (lambda d: edit_info(d, data_path="data/{chunk.__class__}"), "is not a path template inside the dataset"),
    "no tasks": (lambda d: (d / "meta/tasks.parquet").unlink(), "tasks.parquet is missing"),
    "no episodes": (lambda d: shutil.rmtree(d / "meta/episodes"), "holds no parquet file"),
    "no data": (lambda d: (d / DATA).unlink(), "file-000.parquet is missing: copy the dataset again"),
    "no video": (lambda d: (d / VIDEO).unlink(), "file-000.mp4 is missing: copy the dataset again"),
    "half the data": (lambda d: cut(d / DATA, 0.5), "file-000.parquet cannot be read .*: it was cut short"),
    "half the episodes": (lambda d: cut(d / EPISODES, 0.5), "file-000.parquet cannot be read .*: it was cut short"),
    "half a video": (lambda d: cut(d / VIDEO, 0.5), "file-000.mp4 (cannot be decoded|ends before)"),
    "no video at all": (lambda d: (d / VIDEO).write_bytes(b""), "file-000.mp4 cannot be decoded"),
    "a shorter video": (lambda d: shutil.copy(d / f"videos/{WRIST}/chunk-000/file-000.mp4", d / VIDEO), "pixels .*info.json says 32x48"),
    "nan": (lambda d: edit_table(d / DATA, with_nan), "observation.state is not finite in episode 1, frame 1"),
    "a missing row": (lambda d: edit_table(d / DATA, lambda t: t.slice(0, 14)), "does not hold the 7 frames of episode 2"),
    "no actions": (lambda d: edit_table(d / DATA, lambda t: t.drop_columns([ACTION])), "has no column action, which meta/info.json names"),
    "no state": (lambda d: without_features(d, STATE), r"has no feature observation.state \(it has action, next.reward"),
    "a task less": (lambda d: edit_table(d / "meta/tasks.parquet", lambda t: t.slice(0, 1)), "has no task 1 of episode 1"),
    "no times of videos": (
        lambda d: edit_table(d / EPISODES, lambda t: t.drop_columns([f"videos/{FRONT}/from_timestamp"])),
        "lacks videos/observation.images.front/from_timestamp",
    ),
}


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_a_damaged_dataset_is_one_line(tmp_path: Path, accident: str) -> None:
    directory = tmp_path / "data"
    write(directory, video=True)
    read_all(directory)
    happens, message = ACCIDENTS[accident]
    happens(directory)
    with pytest.raises(UserError, match=message) as caught:
        read_all(directory)
    assert "\n" not in str(caught.value)


def test_invalid_images(tmp_path: Path) -> None:
    write(tmp_path / "data")
    empty = pa.array([{"bytes": b"\x89PNG", "path": None}] * 15, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    edit_table(tmp_path / "data" / DATA, lambda t: t.set_column(t.column_names.index(FRONT), FRONT, empty))
    with pytest.raises(UserError, match=r"images\.front of episode 0, frame 0, is no image"):
        read_all(tmp_path / "data")


def test_tasks_whose_index_has_no_name(tmp_path: Path) -> None:
    """As early recordings of v3.0 have them."""
    write(tmp_path / "data")
    edit_table(tmp_path / "data/meta/tasks.parquet", lambda t: t.rename_columns(["task_index", "__index_level_0__"]))
    assert LeRobotReader(tmp_path / "data").episode(1, []).instruction[0] == "task 1"


def test_a_shape_that_starts_with_channels(tmp_path: Path) -> None:
    write(tmp_path / "data")
    features = json.loads((tmp_path / "data/meta/info.json").read_text())["features"]
    features[FRONT] |= {"shape": [3, 32, 48], "names": ["channels", "height", "width"]}
    edit_info(tmp_path / "data", features=features)
    read_all(tmp_path / "data")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    """For any flipped bytes in meta/ and data/, the reader returns a dataset or reports one line."""
    directory = tmp_path / "data"
    if not directory.exists():
        write(directory)
    path = data.draw(st.sampled_from([directory / name for name in ("meta/info.json", "meta/tasks.parquet", EPISODES, DATA)]))
    whole = path.read_bytes()
    try:
        broken = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 4))):
            broken[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(bytes(broken))
        read_all(directory)
    except UserError as error:
        assert "\n" not in str(error)
    finally:
        path.write_bytes(whole)


def grey_video(path: Path, fps: int, levels: list[int]) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"g": "12"})
        stream.height = stream.width = 16
        for level in levels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((16, 16, 3), level, np.uint8), format="rgb24")))
        container.mux(stream.encode(None))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fps=st.sampled_from([3, 10, 24, 30, 50]), chosen=st.lists(st.integers(0, 29), min_size=1, unique=True).map(sorted))
def test_any_frames_of_any_video(tmp_path: Path, fps: int, chosen: list[int]) -> None:
    """Also with distant keyframes and frames that depend on later ones."""
    path = tmp_path / f"{fps}.mp4"
    if not path.exists():
        grey_video(path, fps, [8 * index for index in range(30)])
    found = [round(float(frame.mean()) / 8) for frame in read_frames(path, [index / fps for index in chosen])]
    assert found == chosen


def test_times_between_and_after_frames(tmp_path: Path) -> None:
    grey_video(tmp_path / "v.mp4", 10, [0, 100, 200])
    with pytest.raises(UserError, match=r"has no frame at 0\.1500 s, the next one is at 0\.2000 s"):
        list(read_frames(tmp_path / "v.mp4", [0.1, 0.15]))
    with pytest.raises(UserError, match=r"ends before 0\.3000 s"):
        list(read_frames(tmp_path / "v.mp4", [0.1, 0.3]))

"""Datasets that real lerobot recorded (``fixtures/``), and damaged datasets."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections.abc import Callable
from fnmatch import fnmatchcase
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from rlinf_vla.config.errors import UserError
from rlinf_vla.data.lerobot_format import (
    ACTION,
    DATA_PATH,
    DONE,
    READ,
    REWARD,
    STATE,
    SUCCESS,
    UNUSED,
    place,
)
from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.data.lerobot_video import read_frames
from tests.data import lerobot_peer
from tests.data.changed import changed_bytes
from tests.data.episodes import FRONT, WRIST, write

FIXTURES = Path(__file__).parent / "fixtures"
DATA = DATA_PATH.format(**place(0))
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
VIDEO = f"videos/{FRONT}/chunk-000/file-000.mp4"


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_dataset_recorded_by_lerobot(kind: str) -> None:
    reader = LeRobotReader(FIXTURES / kind)
    assert (
        len(reader) == 3
        and reader.fps == lerobot_peer.FPS
        and list(reader.cameras) == [FRONT, WRIST]
    )
    for number, (length, task) in enumerate(
        zip(lerobot_peer.LENGTHS, lerobot_peer.TASKS, strict=True)
    ):
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


def with_binary(table: pa.Table, name: str) -> pa.Table:
    """Bytes that are not UTF-8, in a column of lists of texts."""
    values = pa.array([[b"\x80"]] * len(table)).cast(pa.list_(pa.string()), safe=False)
    return table.set_column(table.schema.get_field_index(name), name, values)


def cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def with_column(
    path: Path, key: str, change: Callable[[list[Any]], list[Any]], kind: pa.DataType | None = None
) -> None:
    """Replaces the values of a column; ``kind``: its type, by default as before."""

    def changed(table: pa.Table) -> pa.Table:
        values = pa.array(change(table.column(key).to_pylist()), kind or table.column(key).type)
        return table.set_column(table.column_names.index(key), key, values)

    edit_table(path, changed)


def at(row: int, value: Any) -> Callable[[list[Any]], list[Any]]:
    """A change of one row."""
    return lambda rows: [*rows[:row], value, *rows[row + 1 :]]


def with_feature(directory: Path, key: str, **changes: object) -> None:
    features = json.loads((directory / "meta/info.json").read_text())["features"]
    features[key] |= changes
    edit_info(directory, features=features)


def without_features(directory: Path, *keys: str) -> None:
    info = json.loads((directory / "meta/info.json").read_text())
    edit_info(
        directory,
        features={key: value for key, value in info["features"].items() if key not in keys},
    )


def read_all(directory: Path) -> None:
    reader = LeRobotReader(directory)
    for number in range(len(reader)):
        found = reader.episode(number, [STATE, ACTION, REWARD])
        for key in reader.cameras:
            for _ in reader.frames(found, key):
                pass


ACCIDENTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (shutil.rmtree, "is not a directory: name one that holds a LeRobotDataset"),
    "empty": (
        lambda d: [shutil.rmtree(d), d.mkdir()],
        r"has no meta/info\.json: it is no LeRobotDataset",
    ),
    "no info": (
        lambda d: (d / "meta/info.json").unlink(),
        r"has no meta/info\.json: its recording was never finished",
    ),
    "half an info": (lambda d: cut(d / "meta/info.json", 0.5), "info.json cannot be read"),
    "v4": (
        lambda d: edit_info(d, codebase_version="v4.0"),
        "is a LeRobotDataset v4.0, only v2.0, v2.1 and v3.0 can be read",
    ),
    "no features": (
        lambda d: edit_info(d, features=None),
        "info.json is not a valid LeRobotDataset info file",
    ),
    "fewer episodes": (
        lambda d: edit_info(d, total_episodes=9),
        "has 3 episodes with 15 frames, .* says 9 with 15",
    ),
    "another folder": (
        lambda d: edit_info(d, data_path="../{chunk_index}/{file_index}"),
        "is not a path template inside the dataset",
    ),
    "a wrong pattern": (
        lambda d: edit_info(d, data_path="data/{chunk.__class__}"),
        "is not a path template inside the dataset",
    ),
    "no tasks": (lambda d: (d / "meta/tasks.parquet").unlink(), "tasks.parquet is missing"),
    "no episodes": (lambda d: shutil.rmtree(d / "meta/episodes"), "holds no parquet file"),
    "no data": (
        lambda d: (d / DATA).unlink(),
        "file-000.parquet is missing: copy the dataset again",
    ),
    "no video": (lambda d: (d / VIDEO).unlink(), "file-000.mp4 is missing: copy the dataset again"),
    "half the data": (
        lambda d: cut(d / DATA, 0.5),
        "file-000.parquet cannot be read .*: it was cut short",
    ),
    "half the episodes": (
        lambda d: cut(d / EPISODES, 0.5),
        "file-000.parquet cannot be read .*: it was cut short",
    ),
    "a task that is no text": (
        lambda d: edit_table(d / EPISODES, lambda t: with_binary(t, "tasks")),
        "file-000.parquet cannot be read .*UTF8.*: it was cut short or changed",
    ),
    "half a video": (lambda d: cut(d / VIDEO, 0.5), "file-000.mp4 (cannot be decoded|ends before)"),
    "no video at all": (lambda d: (d / VIDEO).write_bytes(b""), "file-000.mp4 cannot be decoded"),
    "a shorter video": (
        lambda d: shutil.copy(d / f"videos/{WRIST}/chunk-000/file-000.mp4", d / VIDEO),
        "pixels .*info.json says 32x48",
    ),
    "nan": (
        lambda d: with_column(d / DATA, STATE, at(6, [0.0, float("nan"), 0.0])),
        "observation.state is not finite in episode 1, frame 1",
    ),
    "a missing row": (
        lambda d: edit_table(d / DATA, lambda t: t.slice(0, 14)),
        "does not hold the 7 frames of episode 2",
    ),
    "no actions": (
        lambda d: edit_table(d / DATA, lambda t: t.drop_columns([ACTION])),
        "has no column action, which meta/info.json names",
    ),
    "no state": (
        lambda d: without_features(d, STATE),
        r"has no feature observation.state \(it has action, next.reward",
    ),
    "a task less": (
        lambda d: edit_table(d / "meta/tasks.parquet", lambda t: t.slice(0, 1)),
        "has no task 1 of episode 1",
    ),
    "infinity in another width": (
        lambda d: with_column(d / DATA, ACTION, at(6, [1e300, 0.0]), pa.list_(pa.float64())),
        "action is not finite in episode 1, frame 1",
    ),
    "a null": (
        lambda d: with_column(d / DATA, ACTION, at(6, None)),
        r"action is not float32 \[2\], .* \(episode 1: row 1 is null\)",
    ),
    "a null in a vector": (
        lambda d: with_column(d / DATA, ACTION, at(6, [0.0, None])),
        r"episode 1: row 1 is null",
    ),
    "a null flag": (
        lambda d: with_column(d / DATA, REWARD, at(14, None)),
        r"next\.reward is not float32 \[1\].* \(episode 2: row 6 is null",
    ),
    "a longer vector": (
        lambda d: with_column(d / DATA, ACTION, at(6, [0.0]), pa.list_(pa.float32())),
        r"action is not float32 \[2\], as meta/info.json says \(episode 1: row 1 has 1 values where 2 belong\)",
    ),
    "too many values": (
        lambda d: with_column(d / DATA, ACTION, at(6, [0.0] * 20), pa.list_(pa.float32())),
        r"file-000.parquet: action is not float32 \[2\].*\(15 rows hold 48 values\)",
    ),
    "a number for a vector": (
        lambda d: with_column(d / DATA, ACTION, lambda rows: [0.0] * 15, pa.float32()),
        "it holds float",
    ),
    "whole numbers": (
        lambda d: with_column(d / DATA, ACTION, lambda rows: [[0, 1]] * 15, pa.list_(pa.int64())),
        "it holds int64",
    ),
    "text": (
        lambda d: with_column(d / DATA, REWARD, lambda rows: ["1"] * 15, pa.string()),
        "it holds string",
    ),
    "twice the rate": (
        lambda d: with_column(d / DATA, "timestamp", lambda rows: [each / 2 for each in rows]),
        "frame 1 of episode 0 is 0.0500 s after the one before, meta/info.json says 10 frames per second",
    ),
    "a lost frame": (
        lambda d: with_column(
            d / DATA, "timestamp", lambda rows: [*rows[:12], *(each + 0.1 for each in rows[12:])]
        ),
        "frame 4 of episode 2 is 0.2000 s after the one before",
    ),
    "a time that is no number": (
        lambda d: with_column(d / DATA, "timestamp", at(9, float("nan"))),
        "frame 1 of episode 2 is nan s after",
    ),
    "another rate of the cameras": (
        lambda d: with_feature(d, FRONT, info={"video.fps": 30}),
        "a feature has 30 frames per second, the dataset 10",
    ),
    "another order": (
        lambda d: with_column(d / DATA, "frame_index", lambda rows: [1, 0, *rows[2:]]),
        "frames of episode 0 in their order",
    ),
    "an episode of no frames": (
        lambda d: with_column(d / EPISODES, "length", lambda rows: [5, 0, 10]),
        "file-000.parquet: length of episode 1 is 0: an episode has at least 1 frame, leave that episode out",
    ),
    "a negative length": (
        lambda d: with_column(d / EPISODES, "length", lambda rows: [5, -3, 13]),
        "length of episode 1 is -3",
    ),
    "a length of a fraction": (
        lambda d: with_column(d / EPISODES, "length", lambda rows: [5.5, 2.5, 7.0], pa.float64()),
        r"length is not int64 \[1\] \(it holds double\)",
    ),
    "a huge length": (
        lambda d: [
            with_column(d / EPISODES, "length", lambda rows: [5, 3, 10**12 - 9]),
            edit_info(d, total_frames=10**12 - 1),
        ],
        "does not hold the 999999999991 frames of episode 2",
    ),
    "a place that is text": (
        lambda d: with_column(d / EPISODES, "data/file_index", lambda rows: ["0"] * 3, pa.string()),
        r"data/file_index is not int64 \[1\] \(it holds string\)",
    ),
    "another instruction": (
        lambda d: with_column(d / EPISODES, "tasks", at(1, ["task 0"])),
        "task 1 of episode 1 is 'task 1', meta/episodes says 'task 0'",
    ),
    "no instruction": (
        lambda d: with_column(d / "meta/tasks.parquet", "task", at(1, None)),
        r"task is not string \[1\] .row 1 is null",
    ),
    "two instructions": (
        lambda d: with_column(d / "meta/tasks.parquet", "task_index", at(1, 0)),
        "has two tasks of one task_index",
    ),
    "more rows than episodes": (
        lambda d: edit_table(d / DATA, lambda t: pa.concat_tables([t, t])),
        "has 30 rows, meta/episodes says 15: copy the dataset again",
    ),
    "a part of another video": (
        lambda d: with_column(d / EPISODES, f"videos/{WRIST}/to_timestamp", lambda rows: [0.1] * 3),
        r"frames from 0\.0000 to 0\.4000 s of observation\.images\.wrist, its part of the video is 0\.0000 to 0\.1000 s",
    ),
    "four channels": (
        lambda d: with_feature(d, FRONT, shape=[32, 48, 4]),
        "images of red, green and blue are needed",
    ),
    "a dtype of any size": (
        lambda d: with_feature(d, ACTION, dtype="S2000000000"),
        "S2000000000 cannot be read",
    ),
    "a negative size": (
        lambda d: with_feature(d, ACTION, shape=[-2]),
        r"shape \[-2\] is not a list of sizes",
    ),
    "a size of any size": (
        lambda d: with_feature(d, ACTION, shape=[10**18]),
        "has 2 values where 1000000000000000000 belong",
    ),
    "a width of any size": (
        lambda d: edit_info(d, data_path="{chunk_index:02000000000d}"),
        "is not a path template inside the dataset",
    ),
    "a path of any length": (lambda d: edit_info(d, data_path="a" * 5000), "is not a name"),
    "lists in lists": (
        lambda d: (d / "meta/info.json").write_text("[" * 100_000),
        "info.json cannot be read",
    ),
    "infinite frames": (
        lambda d: edit_info(d, total_frames=float("inf")),
        "'inf' is not a positive number",
    ),
    "no rate": (lambda d: edit_info(d, fps=0), "'0' is not a positive number"),
    "a playlist": (
        lambda d: (d / VIDEO).write_text(
            "#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:1/a.ts\n#EXT-X-ENDLIST\n"
        ),
        "cannot be decoded .Invalid data",
    ),
    "no times of videos": (
        lambda d: edit_table(
            d / EPISODES, lambda t: t.drop_columns([f"videos/{FRONT}/from_timestamp"])
        ),
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


def file_of(mode: str, kind: str = "PNG", size: tuple[int, int] = (48, 32)) -> bytes:
    file = BytesIO()
    Image.new(mode, size).save(file, kind)
    return file.getvalue()


def png_of_16_bits() -> bytes:
    """RGB of 16 bits, which Pillow cuts to 8."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", 48, 32, 16, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\1\2" * 3 * 48) * 32)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


IMAGES = {
    "cut": (b"\x89PNG", "is no image in PNG or JPEG"),
    "null": (None, "is no image: the file must hold its bytes"),
    "RGBA": (file_of("RGBA"), "is RGBA of 8 bits, RGB of 8 bits is needed"),
    "grey": (file_of("L"), "is L of 8 bits"),
    "grey of 16 bits": (file_of("I;16"), "is I;16 of 16 bits"),
    "palette": (file_of("P"), "is P of 1 bits"),
    "CMYK": (file_of("CMYK", "JPEG"), "is CMYK of 8 bits"),
    "colours of 16 bits": (png_of_16_bits(), "is RGB of 16 bits"),
    "GIF": (file_of("RGB", "GIF"), "is no image in PNG or JPEG"),
    "EPS": (file_of("RGB", "EPS"), "is no image in PNG or JPEG"),
    "large": (file_of("RGB", size=(4096, 4096)), "has 4096x4096 pixels, 32x48 belong"),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_images_other_than_said_are_one_line(tmp_path: Path, kind: str) -> None:
    content, message = IMAGES[kind]
    write(tmp_path / "data")
    with_column(tmp_path / "data" / DATA, FRONT, at(6, {"bytes": content, "path": "/etc/hostname"}))
    with pytest.raises(UserError, match=rf"images\.front of episode 1, frame 1, {message}"):
        read_all(tmp_path / "data")


def test_jpeg_is_an_image(tmp_path: Path) -> None:
    write(tmp_path / "data")
    with_column(
        tmp_path / "data" / DATA, FRONT, at(6, {"bytes": file_of("RGB", "JPEG"), "path": None})
    )
    read_all(tmp_path / "data")


@pytest.mark.parametrize("kind", ["image", "video"])
def test_every_key_that_lerobot_writes_is_read_or_listed_as_unused(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fixtures are of lerobot 0.6.1; its converter adds fps to each feature."""
    directory = FIXTURES / kind
    info = json.loads((directory / "meta/info.json").read_text())
    features = info["features"].values()
    found = {
        "meta/info.json": info,
        "a feature": {"fps", *(key for each in features for key in each)},
    }
    found["info of a feature"] = {key for each in features for key in each.get("info") or {}}
    for part, path in (
        ("meta/episodes", EPISODES),
        ("meta/tasks.parquet", "meta/tasks.parquet"),
        ("data", DATA),
    ):
        found[part] = set(pq.read_schema(directory / path).names) - info["features"].keys()
    found["data"] |= {"timestamp", "frame_index", "episode_index", "index", "task_index"}
    found["meta/stats.json"] = set(json.loads((directory / "meta/stats.json").read_text()))
    for part, keys in found.items():
        for key in keys:
            assert any(
                fnmatchcase(key, each) for each in (*READ.get(part, ()), *UNUSED.get(part, ()))
            ), (part, key)
    LeRobotReader(directory)
    assert capsys.readouterr().err == ""


def test_an_unknown_key_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "data")
    edit_info(tmp_path / "data", action_scale=0.5)
    with_feature(tmp_path / "data", ACTION, unit="mm")
    for _ in range(2):
        LeRobotReader(tmp_path / "data")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "action_scale" in said[0] and "unit" in said[1]


def test_numbers_of_another_width_and_lists_of_one_are_read(tmp_path: Path) -> None:
    """As other tools write them: float64 for float32, and a list of one number for a number."""
    write(tmp_path / "data")
    written = LeRobotReader(tmp_path / "data").episode(1, [ACTION, REWARD]).columns
    with_column(tmp_path / "data" / DATA, ACTION, lambda rows: rows, pa.list_(pa.float64()))
    with_column(
        tmp_path / "data" / DATA,
        REWARD,
        lambda rows: [[each] for each in rows],
        pa.list_(pa.float32()),
    )
    found = LeRobotReader(tmp_path / "data").episode(1, [ACTION, REWARD]).columns
    for key, values in found.items():
        assert (
            values.dtype == np.float32
            and np.array_equal(values, written[key])
            and values.flags.writeable
        )


def test_tasks_whose_index_has_no_name(tmp_path: Path) -> None:
    """As early recordings of v3.0 have them."""
    write(tmp_path / "data")
    edit_table(
        tmp_path / "data/meta/tasks.parquet",
        lambda t: t.rename_columns(["task_index", "__index_level_0__"]),
    )
    assert LeRobotReader(tmp_path / "data").episode(1, []).instruction[0] == "task 1"


def test_a_shape_that_starts_with_channels(tmp_path: Path) -> None:
    write(tmp_path / "data")
    features = json.loads((tmp_path / "data/meta/info.json").read_text())["features"]
    features[FRONT] |= {"shape": [3, 32, 48], "names": ["channels", "height", "width"]}
    edit_info(tmp_path / "data", features=features)
    read_all(tmp_path / "data")


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_changed_bytes_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    """For any flipped bytes in meta/ and data/, the reader returns a dataset or reports one line."""
    directory = tmp_path / "data"
    if not directory.exists():
        write(directory)
    path = data.draw(
        st.sampled_from(
            [directory / name for name in ("meta/info.json", "meta/tasks.parquet", EPISODES, DATA)]
        )
    )
    try:
        with changed_bytes(path, data):
            read_all(directory)
    except UserError as error:
        assert "\n" not in str(error)


def grey_video(path: Path, fps: int, levels: list[int], pixels: str = "yuv420p") -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"g": "12"})
        stream.height = stream.width = 16
        stream.pix_fmt = pixels
        for level in levels:
            container.mux(
                stream.encode(
                    av.VideoFrame.from_ndarray(
                        np.full((16, 16, 3), level, np.uint8), format="rgb24"
                    )
                )
            )
        container.mux(stream.encode(None))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    fps=st.sampled_from([3, 10, 24, 30, 50]),
    chosen=st.lists(st.integers(0, 29), min_size=1, unique=True).map(sorted),
)
def test_any_frames_of_any_video(tmp_path: Path, fps: int, chosen: list[int]) -> None:
    """Also with distant keyframes and frames that depend on later ones."""
    path = tmp_path / f"{fps}.mp4"
    if not path.exists():
        grey_video(path, fps, [8 * index for index in range(30)])
    found = [
        round(float(frame.mean()) / 8)
        for frame in read_frames(path, [index / fps for index in chosen])
    ]
    assert found == chosen


def test_times_between_and_after_frames(tmp_path: Path) -> None:
    grey_video(tmp_path / "v.mp4", 10, [0, 100, 200])
    with pytest.raises(UserError, match=r"has no frame at 0\.1500 s, the next one is at 0\.2000 s"):
        list(read_frames(tmp_path / "v.mp4", [0.1, 0.15]))
    with pytest.raises(UserError, match=r"ends before 0\.3000 s"):
        list(read_frames(tmp_path / "v.mp4", [0.1, 0.3]))


def test_a_video_of_more_than_8_bits_is_one_line(tmp_path: Path) -> None:
    grey_video(tmp_path / "v.mp4", 10, [0, 100, 200], "yuv420p10le")
    with pytest.raises(UserError, match="holds yuv420p10le, colours of 8 bits are needed"):
        list(read_frames(tmp_path / "v.mp4", [0.1]))

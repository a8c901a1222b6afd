"""Shared records and frames: readers get the newest complete record even if the writer dies."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.features.realworld.robot import Frame, ToolPose, ToolState, ToolTarget
from rlinf_vla.robots import shared_record
from rlinf_vla.robots.franka import messages
from rlinf_vla.robots.shared_record import FrameRecord, SharedRecord


def test_readers_get_the_newest_record(tmp_path: Path) -> None:
    writer = SharedRecord(tmp_path / "it", 100)
    reader = SharedRecord(tmp_path / "it")
    assert reader.read() is None
    for text in (b"first", b"second, longer", b""):
        writer.write(text)
        assert reader.read() == text


def test_there_must_be_a_writer(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        SharedRecord(tmp_path / "it")


def test_it_is_in_memory_and_each_writer_removes_old_files(tmp_path: Path) -> None:
    memory = []
    for text in (b"one", b"two"):
        writer = SharedRecord(tmp_path / "it", 100)
        writer.write(text)
        memory.append((tmp_path / "it").readlink())
        assert memory[-1].parent == shared_record.MEMORY and memory[-1].stat().st_mode & 0o077 == 0
    assert not memory[0].exists() and memory[1].exists()
    reader = SharedRecord(tmp_path / "it")
    writer.remove()
    assert reader.read() == b"two" and not memory[1].exists() and not (tmp_path / "it").is_symlink()


@pytest.fixture(autouse=True)
def _tidy(tmp_path: Path) -> Iterator[None]:
    yield
    for path in tmp_path.iterdir():
        if path.is_symlink():
            path.readlink().unlink()


def test_a_killed_writer_leaves_the_last_complete_record(tmp_path: Path) -> None:
    writer = SharedRecord(tmp_path / "it", 100)
    reader = SharedRecord(tmp_path / "it")
    writer.write(b"one")
    writer.write(b"two")
    with (tmp_path / "it").open(
        "r+b"
    ) as file:  # a number and two slots: the third record replaces the first
        file.seek(8 + (len(file.read()) - 8) // 2)
        file.write(b"?" * 50)
    assert reader.read() == b"two"


def _write(path: str, enough: Event) -> None:
    writer = SharedRecord(Path(path))
    number = 0
    while not enough.is_set():
        number = (number + 1) % 256
        writer.write(bytes([number]) * 5000)


def test_no_torn_record_is_read(tmp_path: Path) -> None:
    SharedRecord(tmp_path / "it", 5000)
    spawned = multiprocessing.get_context("spawn")
    enough = spawned.Event()
    process = spawned.Process(target=_write, args=(str(tmp_path / "it"), enough), daemon=True)
    process.start()
    reader = SharedRecord(tmp_path / "it")
    seen = set()
    reads = 0
    while len(seen) < 20 or reads < 5000:
        assert process.is_alive()
        data = reader.read()
        if data is not None:
            assert len(set(data)) == 1
            seen.add(data[0])
            reads += 1
        assert not seen or data is not None, "there is always a newest one"
    enough.set()
    process.join()
    process.close()


def test_frames_keep_their_size_and_time(tmp_path: Path) -> None:
    writer = FrameRecord(tmp_path / "frames", (4, 6))
    reader = FrameRecord(tmp_path / "frames")
    image = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    writer.write(Frame(12.5, 7, image))
    frame = reader.read()
    assert frame is not None and (frame.time, frame.number) == (12.5, 7)
    np.testing.assert_array_equal(frame.image, image)


numbers = st.floats(-1e6, 1e6)


@given(
    st.lists(numbers, min_size=29, max_size=29),
    st.none() | numbers,
    st.booleans(),
    st.none() | st.text(min_size=1, max_size=300),
)
def test_a_state_is_transferred_unchanged(
    values: list[float], width: float | None, commanded: bool, fault: str | None
) -> None:
    array = np.array(values)
    pose = ToolPose(array[1:4], array[4:8])
    state = ToolState(
        array[0],
        array[8:15],
        array[15:22],
        pose,
        array[22:28],
        array[28],
        commanded=ToolTarget(pose, width) if commanded else None,
        fault=None if fault is None else fault.replace("\x00", ""),
        pace=array[0],
        holding=commanded,
    )
    read = messages.unpack(messages.pack(state))
    assert read.pace == state.pace and read.holding is commanded
    for name in ("time", "joints", "joint_velocities", "wrench", "gripper_width"):
        np.testing.assert_array_equal(getattr(read, name), getattr(state, name))
    np.testing.assert_array_equal(read.pose.quaternion, pose.quaternion)
    assert (read.commanded is None) == (not commanded)
    if read.commanded is not None:
        assert read.commanded.gripper_width == width
        np.testing.assert_array_equal(read.commanded.pose.position, pose.position)
    assert (read.fault or "") == (state.fault or "")


def test_a_target_is_transferred_unchanged() -> None:
    target = ToolTarget(ToolPose(np.array([1.0, 2.0, 3.0]), np.array([1.0, 0.0, 0.0, 0.0])), None)
    read = messages.unpack_target(messages.pack_target(target))
    np.testing.assert_array_equal(read.pose.position, target.pose.position)
    np.testing.assert_array_equal(read.pose.quaternion, target.pose.quaternion)
    assert read.gripper_width is None

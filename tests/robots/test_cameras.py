"""Cameras: old, frozen and missing pictures are errors, never pictures."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from franka_session import wait_until
from numpy.typing import NDArray
from obedient import CELL

from rlinf_vla.cli import compose
from rlinf_vla.config.errors import UserError
from rlinf_vla.core import rotations
from rlinf_vla.features.realworld.camera_geometry import Intrinsics, geometry
from rlinf_vla.features.realworld.robot import Camera, CameraError, Frame
from rlinf_vla.features.realworld.sensing import ResizedCamera
from rlinf_vla.robots import cameras, kinematics
from rlinf_vla.robots.cameras import (
    DRIVERS,
    CapturingCamera,
    FrameMonitor,
    OpenCVCamera,
    RealSenseCamera,
    SimulatedCamera,
    device,
)
from rlinf_vla.robots.franka.plugin import franka
from rlinf_vla.robots.real_cell import CameraConfig
from rlinf_vla.robots.simulated import scene
from rlinf_vla.robots.simulated.client import SimulatedCell
from rlinf_vla.robots.simulated.scene import CUBE_M, TABLE_Z
from rlinf_vla.runtime import recipes
from tests.skips import require


def frame(time: float, seed: int) -> Frame:
    return Frame(time, 0, np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8))


def test_an_old_picture_is_refused() -> None:
    watch = FrameMonitor("front", max_age_s=0.2, frozen_s=1.0)
    watch.check(frame(10.0, 0), 10.19)
    with pytest.raises(CameraError, match=r"camera front: its newest picture is 0.30 s old"):
        watch.check(frame(10.0, 0), 10.3)


def test_a_frozen_picture_is_refused_though_its_time_goes_on() -> None:
    watch = FrameMonitor("front", max_age_s=0.2, frozen_s=1.0)
    for tick in range(11):
        watch.check(frame(10.0 + tick / 10, 0), 10.0 + tick / 10)
    with pytest.raises(CameraError, match="frozen"):
        watch.check(frame(11.1, 0), 11.1)
    watch.check(frame(11.2, 1), 11.2)


def _error(camera: Camera) -> str:
    try:
        camera.latest()
    except CameraError as error:
        return str(error)
    return ""


class Scripted(CapturingCamera):
    """A device that shows, waits or breaks as told."""

    def _open(self) -> Callable[[], object]:
        self.pictures: list[NDArray[np.uint8] | Exception] = [frame(0, 0).image]
        self.more = threading.Event()
        self.more.set()
        self.released = threading.Event()
        self.over = False
        return self.released.set

    exposed: float | None = None
    """How long ago the picture was exposed, as the driver says, in seconds."""

    def _read(self) -> tuple[NDArray[np.uint8], float | None]:
        more = self.more  # of this start: that of the next one is not to be cleared
        more.wait()
        more.clear()
        if self.over:
            raise EOFError
        picture = self.pictures[-1]
        if isinstance(picture, Exception):
            raise picture
        return picture, None if self.exposed is None else cameras.time.monotonic() - self.exposed

    def end(self) -> None:
        """Close it and let its thread end, which must not take the picture and wait for another one."""
        self.over = True
        self.more.set()
        self.close()


HANG_S = 120.0
"""Seconds that only bound a hang."""
LASTING = CameraConfig(max_age_s=60.0, frozen_s=60.0)
"""Pictures age by hand: the machine itself may stand still for longer than a real camera is allowed to."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first picture may be late on a busy machine, too: the limit only bounds a hang."""
    monkeypatch.setattr(cameras, "FIRST_FRAME_S", HANG_S)


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    camera = Scripted("wrist", LASTING)
    camera.start()
    yield camera
    camera.end()


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the cameras' clock forward by so many seconds."""
    ahead = [0.0]
    monkeypatch.setattr(
        cameras,
        "time",
        SimpleNamespace(monotonic=lambda: time.monotonic() + sum(ahead), sleep=time.sleep),
    )
    return ahead.append


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    """The cameras' clock, which stands: a thread may stand still at any line."""
    moment = time.monotonic()
    monkeypatch.setattr(
        cameras, "time", SimpleNamespace(monotonic=lambda: moment, sleep=time.sleep)
    )
    return moment


def test_the_newest_picture_is_there_at_once_and_ages(
    scripted: Scripted, later: Callable[[float], None]
) -> None:
    assert scripted.latest().number == 1
    later(61.0)
    with pytest.raises(CameraError, match="camera wrist: its newest picture is"):
        scripted.latest()


def test_a_device_that_breaks_is_named(scripted: Scripted) -> None:
    scripted.pictures.append(RuntimeError("unplugged"))
    scripted.more.set()
    wait_until(lambda: _error(scripted), HANG_S, "it is noticed")
    with pytest.raises(CameraError, match="camera wrist: unplugged"):
        scripted.latest()


def test_a_device_that_broke_is_started_anew(scripted: Scripted) -> None:
    for _ in range(2):
        scripted.pictures.append(RuntimeError("unplugged"))
        scripted.more.set()
        wait_until(lambda: _error(scripted), HANG_S, "it is noticed")
        scripted.close()
        with pytest.raises(CameraError, match="unplugged"):
            scripted.latest()
        scripted.start()
        assert scripted.latest().number == 1
        scripted.more.set()
        wait_until(lambda: scripted.latest().number > 1, HANG_S, "it goes on")


def test_a_device_that_was_away_is_not_frozen(later: Callable[[float], None]) -> None:
    camera = Scripted("wrist", replace(LASTING, frozen_s=0.1))
    camera.start()
    camera.latest()
    camera.end()
    later(10.0)
    camera.start()
    assert camera.latest().number == 1, (
        "the same picture as then, which says nothing of the time in between"
    )
    camera.end()


def test_who_still_waits_for_the_device_before_says_nothing_any_more(scripted: Scripted) -> None:
    before, released = scripted.more, scripted.released
    scripted.close()  # in vain: its thread waits for a picture for longer
    scripted.start()
    first = scripted.latest()
    scripted.pictures.append(RuntimeError("of the device before"))
    before.set()
    assert released.wait(120)
    assert scripted.latest() is first


def test_a_camera_is_started_first() -> None:
    with pytest.raises(CameraError, match="has not been started"):
        Scripted("wrist", CameraConfig()).latest()


def test_an_unknown_driver_is_one_line() -> None:
    with pytest.raises(
        CameraError, match=r"robot.cameras.front.driver=gopro: must be one of opencv, realsense"
    ):
        device("front", CameraConfig(driver="gopro"))


def realsense() -> Any:
    require("franka")
    return pytest.importorskip(
        "pyrealsense2", exc_type=ImportError, reason="libusb is not installed"
    )


def test_opencv_shows_a_film_and_says_when_it_ends(tmp_path: Path) -> None:
    require("franka")
    import cv2

    writer = cv2.VideoWriter(
        str(tmp_path / "film.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 30, (64, 48)
    )
    for _ in range(3):
        writer.write(np.full((48, 64, 3), (0, 0, 200), np.uint8))  # BGR: red
    writer.release()
    pictures = threading.Semaphore(1)

    class OneByOne(OpenCVCamera):
        def _read(self) -> tuple[NDArray[np.uint8], float | None]:
            pictures.acquire()
            return super()._read()

    camera = OneByOne(
        "film", CameraConfig(device=str(tmp_path / "film.avi"), max_age_s=60.0, frozen_s=60.0)
    )
    camera.start()
    red, green, blue = camera.latest().image[24, 32].astype(int)
    assert red > 150 and green < 60 and blue < 60
    pictures.release(3)
    wait_until(lambda: "gives no more pictures" in _error(camera), HANG_S, "the film ends")
    camera.close()


def test_opencv_names_a_device_that_is_not_there() -> None:
    require("franka")
    with pytest.raises(CameraError, match="OpenCV finds nothing at device '97'"):
        device("front", CameraConfig(driver="opencv", device="97")).start()


def test_a_missing_realsense_is_named_at_once() -> None:
    realsense()
    with pytest.raises(CameraError, match="camera front: no RealSense 123 here"):
        device("front", CameraConfig(device="123")).start()


def test_realsense_pictures_are_read_as_the_driver_gives_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A software device of librealsense stands in for the sensor."""
    rs = realsense()
    monkeypatch.setattr(
        cameras, "LONGEST_TRANSFER_S", HANG_S
    )  # the thread may stand still before it looks at the clock
    image = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)

    class OnSoftware(RealSenseCamera):
        def _serials(self, rs: Any) -> list[str]:
            return ["123"]

        def _stream(self, rs: Any, serial: str, queue: Any) -> Any:
            self._software = rs.software_device()
            sensor = self._software.add_sensor("colour")
            stream = rs.video_stream()
            stream.type = rs.stream.color
            stream.uid = 0
            stream.width = 64
            stream.height = 48
            stream.fps = 30
            stream.bpp = 3
            stream.fmt = rs.format.rgb8
            profile = sensor.add_video_stream(stream)
            sensor.open(profile)
            sensor.start(queue)
            picture = rs.software_video_frame()
            picture.stride = 64 * 3
            picture.bpp = 3
            picture.pixels = image
            picture.profile = profile.as_video_stream_profile()
            picture.timestamp = 1_000_000.0
            picture.domain = rs.timestamp_domain.system_time
            sensor.set_metadata(rs.frame_metadata_value.time_of_arrival, 1_000_300)
            sensor.on_video_frame(picture)
            return sensor

    camera = OnSoftware("front", CameraConfig(device="123", max_age_s=HANG_S))
    camera.start()
    np.testing.assert_array_equal(camera.latest().image, image)
    assert time.monotonic() - camera.latest().time >= 0.3
    camera.close()
    assert rs is not None


@pytest.mark.simulator
@pytest.mark.realtime
def test_simulated_cameras_see_the_table_and_freeze_and_fall_silent(tmp_path: Path) -> None:
    require("franka")
    early = SimulatedCamera("front", tmp_path, 2.0, 1.0)
    with pytest.raises(CameraError, match="connect the robot first"):
        early.start()
    cell = SimulatedCell(tmp_path)
    try:
        cell.start(120, ["front"], 96, 96, 10)
        camera = SimulatedCamera("front", tmp_path, 2.0, 1.0)
        camera.start()
        first = camera.latest()
        assert first.image.shape == (96, 96, 3)
        red = (first.image[..., 0] > 120) & (first.image[..., 1] < 80) & (first.image[..., 2] < 80)
        green = (first.image[..., 1] > 120) & (first.image[..., 0] < 100)
        assert 5 < red.sum() < 500 and 5 < green.sum() < 700, "a red cube and a green disc"
        place = np.array([0.45, -0.12, TABLE_Z + CUBE_M / 2])
        cell.place((place[0], place[1], 0.0), (0.5, 0.15))
        wait_until(lambda: camera.latest().number > first.number + 2, 5, "pictures go on")
        seen = camera.latest().image.astype(int)
        rows, columns = np.nonzero((seen[..., 0] > 120) & (seen[..., 1] < 80) & (seen[..., 2] < 80))
        mount = CELL.cameras["front"]
        inside = camera.intrinsics
        assert inside is not None
        ray = np.array(rotations.matrix(mount.quaternion_wxyz)).T @ (
            place - np.array(mount.position_m)
        )
        pixel = inside.cx + inside.fx * ray[0] / ray[2], inside.cy + inside.fy * ray[1] / ray[2]
        assert (columns.mean(), rows.mean()) == pytest.approx(pixel, abs=1.5), (
            "intrinsics and extrinsics predict where the cube is seen"
        )
        cell.fault("freeze front")
        wait_until(lambda: "frozen" in _error(camera), 6, "it is seen to be frozen")
        cell.fix("freeze front")
        wait_until(lambda: not _error(camera), 5, "it is well again")
        cell.fault("lose front")
        wait_until(lambda: " s old" in _error(camera), 6, "it is missed")
    finally:
        cell.close()


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("+robot.cameras.front.drivr=opencv", "robot.cameras.front: Key 'drivr' not in"),
        ("+robot.cameras.front.width=wide", "robot.cameras.front: Value 'wide'"),
        (
            "+robot.cameras.front=opencv",
            "robot.cameras.front=opencv must be keys and values: driver, device",
        ),
    ],
)
def test_a_camera_of_a_recipe(given: str, complaint: str) -> None:
    def made_by(override: str) -> list[Camera]:
        robot = [
            "robot=franka",
            "robot.host=127.0.0.99",
            "robot.cell=cell://franka_sim",
            "session.acknowledge=operator",
        ]
        found = recipes.read(
            compose.load("train", ["recipe=franka_rlpd", "cluster=laptop", *robot, override])
        )
        return franka.cameras(found.robot)

    (made,) = made_by("+robot.cameras.front.driver=opencv")
    assert made.name == "front" and isinstance(made, DRIVERS["opencv"])
    with pytest.raises(UserError, match=re.escape(complaint)):
        made_by(given)


def test_the_places_of_the_simulated_cameras_are_mujocos() -> None:
    require("franka")
    import mujoco

    simulator, _ = scene.build()
    simulator.init()
    simulator.start()
    model, data = simulator.model, simulator.data
    mujoco.mj_forward(model, data)
    flange = kinematics.FrankaKinematics((0, 0, 0), (1, 0, 0, 0)).pose(np.array(scene.HOME))
    turn = np.array(rotations.matrix(flange.quaternion.tolist()))
    for name, mount in CELL.cameras.items():
        at = np.array(mount.position_m)
        axes = np.array(rotations.matrix(mount.quaternion_wxyz))
        if mount.parent == "flange":
            at = flange.position + turn @ at
            axes = turn @ axes
        camera = model.camera(name).id
        assert at == pytest.approx(data.cam_xpos[camera], abs=1e-4)
        assert axes == pytest.approx(
            data.cam_xmat[camera].reshape(3, 3) @ np.diag([1, -1, -1]), abs=1e-4
        )
        assert model.camera(name).fovy == scene.FOVY_DEG[name]


def test_the_geometry_of_a_resized_camera_is_that_of_its_images(scripted: Scripted) -> None:
    resized = ResizedCamera(scripted, (2, 1))
    assert (
        resized.intrinsics is None is resized.mount
        and geometry(resized) == geometry(object()) == {}
    )
    scripted.intrinsics = Intrinsics(4, 4, 8.0, 6.0, 1.5, 1.5)
    scripted.mount = CELL.cameras["front"]
    known = json.loads(json.dumps(geometry(resized)))
    assert known["intrinsics"]["fx"] == 2.0 and known["mount"]["position_m"] == list(
        scripted.mount.position_m
    )
    assert (
        resized.intrinsics == Intrinsics(1, 2, 2.0, 3.0, 0.0, 0.5)
        and resized.mount is scripted.mount
    )


@pytest.mark.parametrize(("before", "left", "top"), [(0.5, 0, 28), (1.0, 0, 56)])
def test_a_policy_with_bars_sees_no_stretched_image(before: float, left: int, top: int) -> None:
    """A bright pixel of a 640 x 480 image, whose place the intrinsics give: a camera's default, for a policy of 224 x 224."""
    image = np.zeros((480, 640, 3), np.uint8)
    image[120:180, 320:380] = 255
    still: Any = SimpleNamespace(
        name="wrist", intrinsics=Intrinsics(640, 480, 600.0, 600.0, 319.5, 239.5), mount=None
    )
    still.start = lambda: None
    still.latest = lambda: Frame(0.0, 1, image)
    camera = ResizedCamera(still, (224, 224), before)
    camera.start()
    shown = camera.latest().image
    rows, columns = np.nonzero(shown[..., 0] > 127)
    assert shown.shape == (224, 224, 3) and abs(np.ptp(rows) - np.ptp(columns)) <= 1, (
        "a square stays one"
    )
    known = camera.intrinsics
    assert known is not None and known.fx == pytest.approx(known.fy) == pytest.approx(210)
    middle = (
        (349.5 - 319.5) / 600 * known.fx + known.cx,
        (149.5 - 239.5) / 600 * known.fy + known.cy,
    )
    assert (columns.mean(), rows.mean()) == pytest.approx(middle, abs=0.6)
    assert not shown[:top].any() and (known.cx, known.cy) == pytest.approx(
        (111.5 + left, 83.5 + top)
    )


@pytest.mark.parametrize(
    ("exposed", "age"),
    [(0.25, 0.25), (None, 0.1), (2.0, 0.1), (-5.0, 0.1)],
    ids=["stated", "not stated", "too long ago", "in the future"],
)
def test_the_time_of_a_picture_is_its_exposure(
    exposed: float | None, age: float, now: float
) -> None:
    camera = Scripted("wrist", replace(LASTING, latency_s=0.1))
    camera.exposed = exposed
    camera.start()
    assert camera.latest().time == now - age
    camera.end()


def test_opencv_takes_times_of_the_kernels_driver_only(
    monkeypatch: pytest.MonkeyPatch, now: float
) -> None:
    require("franka")
    import cv2

    class Device:
        backend = "V4L2"

        def __init__(self, device: int) -> None:
            pass

        def isOpened(self) -> bool:
            return True

        def set(self, key: int, value: float) -> bool:
            return True

        def read(self) -> tuple[bool, NDArray[np.uint8]]:
            time.sleep(0.01)
            return True, np.zeros((4, 4, 3), np.uint8)

        def get(self, key: int) -> float:
            assert key == cv2.CAP_PROP_POS_MSEC
            return 1000 * (now - 0.3)

        def getBackendName(self) -> str:
            return self.backend

        def release(self) -> None:
            pass

    monkeypatch.setattr(cv2, "VideoCapture", Device)
    for Device.backend, age in (("V4L2", 0.3), ("FFMPEG", 0.0)):
        camera = OpenCVCamera("front", replace(LASTING, driver="opencv"))
        camera.start()
        assert camera.latest().time == pytest.approx(now - age, abs=1e-6)
        camera.close()


def test_a_device_is_released_by_whoever_reads_it(scripted: Scripted) -> None:
    scripted.close()  # while a picture is waited for
    assert not scripted.released.is_set()
    scripted.more.set()
    assert scripted.released.wait(120)

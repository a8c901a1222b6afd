"""Cameras that say when their picture is old, frozen or missing, instead of showing it.

A picture's time is when it arrived at this machine; exposure and transfer came before, usually one to two pictures long.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.robot import CameraError, Frame

from .extra import INSTALL, LIBUSB
from .frames import FrameRecord
from .simulated.client import frames_path

FIRST_FRAME_S = 10.0


class CameraOptions(Protocol):
    """See franka.config.CameraConfig."""

    driver: str
    device: str | None
    width: int
    height: int
    hz: int
    max_age_s: float
    frozen_s: float


class Watch:
    """Whether a camera's newest picture may be believed."""

    def __init__(self, name: str, max_age_s: float, frozen_s: float) -> None:
        self._name, self._max_age_s, self._frozen_s = name, max_age_s, frozen_s
        self._digest = -1
        self._changed = 0.0
        """Time of the first picture that looked like the newest one."""

    def check(self, frame: Frame, now: float) -> None:
        """Raises CameraError. Sensors are noisy: pictures that agree in every bit are one picture."""
        age = now - frame.time
        if age > self._max_age_s:
            raise CameraError(
                f"camera {self._name}: its newest picture is {age:.2f} s old, {self._max_age_s:g} s are allowed; is it plugged in?"
            )
        digest = zlib.crc32(frame.image.tobytes())
        if digest != self._digest:
            self._digest, self._changed = digest, frame.time
        elif frame.time - self._changed > self._frozen_s:
            raise CameraError(
                f"camera {self._name}: frozen, the same picture to the bit for {frame.time - self._changed:.2f} s; plug it in anew"
            )


class SimulatedCamera:
    """Of a simulated cell, which runs already."""

    def __init__(self, name: str, folder: Path, max_age_s: float, frozen_s: float) -> None:
        self.name = name
        self._path = frames_path(folder, name)
        self._watch = Watch(name, max_age_s, frozen_s)
        self._frames: FrameRecord | None = None

    def start(self) -> None:
        try:
            self._frames = FrameRecord(self._path)
        except OSError:
            raise CameraError(f"camera {self.name}: no simulated cell in {self._path.parent} draws it; connect the robot first") from None

    def latest(self) -> Frame:
        frame = self._frames.read() if self._frames else None
        if frame is None:
            raise CameraError(f"camera {self.name} has not been started")
        self._watch.check(frame, time.monotonic())
        return frame

    def close(self) -> None:
        self._frames = None


class CapturingCamera(ABC):
    """A thread waits for pictures, so that nobody else does."""

    def __init__(self, name: str, options: CameraOptions) -> None:
        self.name = name
        self._options = options
        self._thread: threading.Thread | None = None
        self._forget()

    def _forget(self) -> None:
        self._watch = Watch(self.name, self._options.max_age_s, self._options.frozen_s)
        self._newest: Frame | None = None
        self._failure: str | None = None
        self._closed = threading.Event()  # of this start alone: a thread that still waits for the device before knows its own

    def start(self) -> None:
        """Also anew, after ``close``. Raises CameraError, also where no picture comes within FIRST_FRAME_S."""
        self._forget()
        self._thread = threading.Thread(target=self._capture, args=(self._closed, self._open()), daemon=True)
        self._thread.start()
        deadline = time.monotonic() + FIRST_FRAME_S
        while self._newest is None:
            if self._failure or time.monotonic() > deadline:
                self.close()
                raise CameraError(f"camera {self.name}: {self._failure or f'no picture within {FIRST_FRAME_S:g} s'}")
            time.sleep(0.01)

    def latest(self) -> Frame:
        if self._failure is not None:
            raise CameraError(f"camera {self.name}: {self._failure}")
        if self._newest is None:
            raise CameraError(f"camera {self.name} has not been started")
        self._watch.check(self._newest, time.monotonic())
        return self._newest

    def close(self) -> None:
        """Idempotent."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(1.0)
            self._thread = None

    def _capture(self, closed: threading.Event, release: Callable[[], object]) -> None:
        number = 0
        while True:
            failure = None
            try:
                image = self._read()
            except Exception as error:
                failure = " ".join(str(error).split()) or type(error).__name__
            if closed.is_set():
                break
            if failure is not None:
                self._failure = failure
                break
            number += 1
            self._newest = Frame(time.monotonic(), number, image)
        with contextlib.suppress(Exception):  # of a device that is gone
            release()

    @abstractmethod
    def _open(self) -> Callable[[], object]:
        """What lets the device go; it is called where nobody reads it any more. Raises CameraError."""

    @abstractmethod
    def _read(self) -> NDArray[np.uint8]:
        """The next picture, when it comes: RGB ``[H, W, 3]``."""


class OpenCVCamera(CapturingCamera):
    """Anything that OpenCV opens: an index, /dev/v4l/by-id/..., a file or a stream."""

    def _open(self) -> Callable[[], object]:
        try:
            import cv2
        except ImportError:
            raise CameraError(f"camera {self.name}: OpenCV is not installed: {INSTALL}") from None
        device = self._options.device or "0"
        self._cv2, self._device = cv2, cv2.VideoCapture(int(device) if device.isdigit() else device)
        if not self._device.isOpened():
            raise CameraError(f"camera {self.name}: OpenCV finds nothing at device {device!r}; `ls /dev/v4l/by-id` names what is there")
        for key, value in (("WIDTH", self._options.width), ("HEIGHT", self._options.height)):
            self._device.set(getattr(cv2, f"CAP_PROP_FRAME_{key}"), value)
        self._device.set(cv2.CAP_PROP_FPS, self._options.hz)
        self._device.set(cv2.CAP_PROP_BUFFERSIZE, 1)  # no queue of old pictures
        return self._device.release

    def _read(self) -> NDArray[np.uint8]:
        there, image = self._device.read()
        if not there:
            raise RuntimeError("it gives no more pictures")
        return np.asarray(self._cv2.cvtColor(image, self._cv2.COLOR_BGR2RGB), np.uint8)


class RealSenseCamera(CapturingCamera):
    """The colour stream of an Intel RealSense."""

    def _open(self) -> Callable[[], object]:
        try:
            import pyrealsense2 as rs
        except ImportError as error:
            mend = LIBUSB if "libusb" in str(error) else INSTALL
            raise CameraError(f"camera {self.name}: pyrealsense2 cannot be imported: {mend}") from None
        self._queue = rs.frame_queue(1)  # the newest alone
        serials = self._serials(rs)
        wanted = self._options.device or next(iter(serials), None)
        if wanted not in serials:
            found = ", ".join(serials) or "none is plugged in"
            raise CameraError(f"camera {self.name}: no RealSense {wanted or ''} here (found: {found})".replace("  ", " "))
        return self._stream(rs, wanted).stop

    def _serials(self, rs: Any) -> list[str]:
        return [device.get_info(rs.camera_info.serial_number) for device in rs.context().query_devices()]

    def _stream(self, rs: Any, serial: str) -> Any:
        config, pipeline = rs.config(), rs.pipeline()
        config.enable_device(serial)
        config.enable_stream(rs.stream.color, self._options.width, self._options.height, rs.format.rgb8, self._options.hz)
        try:
            pipeline.start(config, self._queue)
        except RuntimeError as error:
            size = f"{self._options.width}x{self._options.height} at {self._options.hz} Hz"
            raise CameraError(f"camera {self.name}: the RealSense {serial} does not stream {size}: {error}") from None
        return pipeline

    def _read(self) -> NDArray[np.uint8]:
        frame = self._queue.wait_for_frame(1000)  # milliseconds
        if frame.is_frameset():
            frame = frame.as_frameset().get_color_frame()
        return np.array(frame.get_data(), np.uint8)  # a copy: the driver uses its memory again


DRIVERS = {"opencv": OpenCVCamera, "realsense": RealSenseCamera}


def device(name: str, options: CameraOptions) -> CapturingCamera:
    """Raises CameraError for a driver that there is not."""
    if options.driver not in DRIVERS:
        raise CameraError(f"robot.cameras.{name}.driver={options.driver}: one of {', '.join(DRIVERS)}")
    return DRIVERS[options.driver](name, options)

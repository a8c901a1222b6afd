"""Camera drivers that raise an error when a frame is stale, frozen or missing.

The time of a frame is that of its exposure, as far as the driver knows it: a RealSense's own time
stamps, or those of the kernel's video driver. Otherwise it is the arrival at this machine, which
exposure and transfer precede, usually by one to two frame periods: ``latency_s`` subtracts them.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.features.realworld.camera_geometry import Intrinsics, Mount, geometry
from rlinf_vla.features.realworld.robot import Camera, CameraError, Finding, Frame

from .extra import INSTALL, LIBUSB
from .real_cell import CameraConfig
from .shared_record import FrameRecord
from .simulated.client import frames_path
from .simulated.scene import intrinsics

FIRST_FRAME_S = 10.0
LONGEST_TRANSFER_S = 1.0
"""An exposure that is said to be longer ago than this, or in the future, is not believed."""


class FrameMonitor:
    """Check that the newest frame of a camera is neither stale nor frozen."""

    def __init__(self, name: str, max_age_s: float, frozen_s: float) -> None:
        self._name = name
        self._max_age_s = max_age_s
        self._frozen_s = frozen_s
        self._digest = -1
        self._changed = 0.0
        """Time of the first frame with the current image."""

    def check(self, frame: Frame | None, now: float) -> Frame:
        """Return ``frame``. Raises CameraError if it is None, too old, or bit-identical for too
        long: sensors are noisy, so bit-identical images are the same image.
        """
        if frame is None:
            raise CameraError(f"camera {self._name} has not been started")
        age = now - frame.time
        if age > self._max_age_s:
            raise CameraError(
                f"camera {self._name}: its newest picture is {age:.2f} s old, {self._max_age_s:g} s are allowed; is it plugged in?"
            )
        digest = zlib.crc32(frame.image.tobytes())
        if digest != self._digest:
            self._digest = digest
            self._changed = frame.time
        elif frame.time - self._changed > self._frozen_s:
            raise CameraError(
                f"camera {self._name}: frozen, bit-identical pictures for {frame.time - self._changed:.2f} s; unplug and replug it"
            )
        return frame


class SimulatedCamera:
    """Camera of a simulated cell that is already running."""

    def __init__(
        self, name: str, folder: Path, max_age_s: float, frozen_s: float, mount: Mount | None = None
    ) -> None:
        self.name = name
        self.mount = mount
        self._path = frames_path(folder, name)
        self._watch = FrameMonitor(name, max_age_s, frozen_s)
        self._frames: FrameRecord | None = None

    def start(self) -> None:
        try:
            self._frames = FrameRecord(self._path)
        except OSError:
            raise CameraError(
                f"camera {self.name}: no simulated cell in {self._path.parent} renders it; connect the robot first"
            ) from None

    @property
    def intrinsics(self) -> Intrinsics | None:
        frame = self._frames.read() if self._frames else None
        return (
            None
            if frame is None
            else intrinsics(self.name, frame.image.shape[1], frame.image.shape[0])
        )

    def latest(self) -> Frame:
        return self._watch.check(self._frames.read() if self._frames else None, time.monotonic())

    def close(self) -> None:
        self._frames = None


class _Capture:
    """What the thread of one start reports: a late one of an earlier start reports to nobody."""

    def __init__(self) -> None:
        self.newest: Frame | None = None
        self.failure: str | None = None
        self.closed = threading.Event()


class CapturingCamera(ABC):
    """Capture frames in a thread, so that ``latest`` never waits for the device."""

    def __init__(self, name: str, options: CameraConfig, mount: Mount | None = None) -> None:
        self.name = name
        self.mount = mount
        self.intrinsics: Intrinsics | None = None
        """Set by ``start`` if the driver knows them."""
        self._options = options
        self._thread: threading.Thread | None = None
        self._forget()

    def _forget(self) -> None:
        self._watch = FrameMonitor(self.name, self._options.max_age_s, self._options.frozen_s)
        self._now = _Capture()

    def start(self) -> None:
        """Start the capture; may be called again after ``close``.

        Raises CameraError if the device fails or sends no frame within FIRST_FRAME_S.
        """
        self._forget()
        self._thread = threading.Thread(
            target=self._capture, args=(self._now, self._open()), daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + FIRST_FRAME_S
        while self._now.newest is None:
            if self._now.failure or time.monotonic() > deadline:
                self.close()
                raise CameraError(
                    f"camera {self.name}: {self._now.failure or f'no picture within {FIRST_FRAME_S:g} s'}"
                )
            time.sleep(0.01)

    def latest(self) -> Frame:
        if self._now.failure is not None:
            raise CameraError(f"camera {self.name}: {self._now.failure}")
        return self._watch.check(self._now.newest, time.monotonic())

    def close(self) -> None:
        """Stop the capture. Idempotent."""
        self._now.closed.set()
        if self._thread is not None:
            self._thread.join(1.0)
            self._thread = None

    def _capture(self, capture: _Capture, release: Callable[[], object]) -> None:
        number = 0
        while True:
            failure = None
            try:
                image, exposed = self._read()
            except Exception as error:
                failure = " ".join(str(error).split()) or type(error).__name__
            if capture.closed.is_set():
                break
            if failure is not None:
                capture.failure = failure
                break
            number += 1
            now = time.monotonic()
            if exposed is None or not 0 <= now - exposed <= LONGEST_TRANSFER_S:
                exposed = now - self._options.latency_s
            capture.newest = Frame(exposed, number, image)
        with contextlib.suppress(Exception):  # the device may be disconnected
            release()

    @abstractmethod
    def _open(self) -> Callable[[], object]:
        """Open the device; return the function that releases it, which the capture thread calls.

        Raises CameraError.
        """

    @abstractmethod
    def _read(self) -> tuple[NDArray[np.uint8], float | None]:
        """Wait for the next image, RGB ``[H, W, 3]``; return it and the time of its exposure.

        The time is ``time.monotonic()``'s, in seconds; None if the driver does not know it.
        """


class OpenCVCamera(CapturingCamera):
    """Any device that OpenCV opens: an index, /dev/v4l/by-id/..., a file or a stream."""

    def _open(self) -> Callable[[], object]:
        try:
            import cv2
        except ImportError:
            raise CameraError(f"camera {self.name}: OpenCV is not installed: {INSTALL}") from None
        device = self._options.device or "0"
        self._cv2 = cv2
        self._device = cv2.VideoCapture(int(device) if device.isdigit() else device)
        if not self._device.isOpened():
            raise CameraError(
                f"camera {self.name}: OpenCV finds nothing at device {device!r}; `ls /dev/v4l/by-id` names what is there"
            )
        for key, value in (("WIDTH", self._options.width), ("HEIGHT", self._options.height)):
            self._device.set(getattr(cv2, f"CAP_PROP_FRAME_{key}"), value)
        self._device.set(cv2.CAP_PROP_FPS, self._options.hz)
        self._device.set(cv2.CAP_PROP_BUFFERSIZE, 1)  # no queue of old frames
        self._stamped = (
            self._device.getBackendName() == "V4L2"
        )  # elsewhere it is the position in a film
        return self._device.release

    def _read(self) -> tuple[NDArray[np.uint8], float | None]:
        there, image = self._device.read()
        if not there:
            raise RuntimeError("it gives no more pictures")
        exposed = self._device.get(self._cv2.CAP_PROP_POS_MSEC) / 1000 if self._stamped else None
        return np.asarray(self._cv2.cvtColor(image, self._cv2.COLOR_BGR2RGB), np.uint8), exposed


class RealSenseCamera(CapturingCamera):
    """Colour stream of an Intel RealSense."""

    def _open(self) -> Callable[[], object]:
        try:
            import pyrealsense2 as rs
        except ImportError as error:
            fix = LIBUSB if "libusb" in str(error) else INSTALL
            raise CameraError(
                f"camera {self.name}: pyrealsense2 cannot be imported: {fix}"
            ) from None
        self._queue = rs.frame_queue(1)  # keeps only the newest frame
        # time stamps of this machine's clock, as those of the arrival at the driver are
        self._clocks = (rs.timestamp_domain.global_time, rs.timestamp_domain.system_time)
        self._arrival = rs.frame_metadata_value.time_of_arrival
        serials = self._serials(rs)
        serial = self._options.device or next(iter(serials), None)
        if serial not in serials:
            listing = ", ".join(serials) or "none is plugged in"
            raise CameraError(
                f"camera {self.name}: no RealSense {serial or ''} here (found: {listing})".replace(
                    "  ", " "
                )
            )
        return self._stream(rs, serial, self._queue).stop

    def _serials(self, rs: Any) -> list[str]:
        return [
            device.get_info(rs.camera_info.serial_number) for device in rs.context().query_devices()
        ]

    def _stream(self, rs: Any, serial: str, queue: Any) -> Any:
        config, pipeline = rs.config(), rs.pipeline()
        config.enable_device(serial)
        config.enable_stream(
            rs.stream.color,
            self._options.width,
            self._options.height,
            rs.format.rgb8,
            self._options.hz,
        )
        try:
            profile = pipeline.start(config, queue)
        except RuntimeError as error:
            size = f"{self._options.width}x{self._options.height} at {self._options.hz} Hz"
            raise CameraError(
                f"camera {self.name}: the RealSense {serial} does not stream {size}: {error}"
            ) from None
        self.intrinsics = _intrinsics(
            profile.get_stream(rs.stream.color).as_video_stream_profile().get_intrinsics()
        )
        return pipeline

    def _read(self) -> tuple[NDArray[np.uint8], float | None]:
        frame = self._queue.wait_for_frame(1000)  # milliseconds
        if frame.is_frameset():
            frame = frame.as_frameset().get_color_frame()
        exposed = None
        if frame.get_frame_timestamp_domain() in self._clocks and frame.supports_frame_metadata(
            self._arrival
        ):
            exposed = (
                time.monotonic()
                - (frame.get_frame_metadata(self._arrival) - frame.get_timestamp()) / 1000
            )
        return np.array(frame.get_data(), np.uint8), exposed  # a copy: the driver reuses its memory


def _intrinsics(source: Any) -> Intrinsics:
    """Convert librealsense's, whose image coordinates are ours."""
    return Intrinsics(
        source.width,
        source.height,
        source.fx,
        source.fy,
        source.ppx,
        source.ppy,
        str(source.model),
        tuple(source.coeffs),
    )


DRIVERS = {"opencv": OpenCVCamera, "realsense": RealSenseCamera}


def device(name: str, options: CameraConfig, mount: Mount | None = None) -> CapturingCamera:
    """Return the camera of ``options.driver``. Raises CameraError if that driver is unknown."""
    if options.driver not in DRIVERS:
        raise CameraError(
            f"robot.cameras.{name}.driver={options.driver}: must be one of {', '.join(DRIVERS)}"
        )
    return DRIVERS[options.driver](name, options, mount)


def check_camera(camera: Camera) -> Finding:
    name = f"camera {camera.name}"
    try:
        camera.start()
        frame = camera.latest()
        height, width, _ = frame.image.shape
        age = 1000 * (time.monotonic() - frame.time)
        return Finding(name, True, f"{width}x{height}, {age:.0f} ms old; {_geometry(camera)}")
    except CameraError as error:
        return Finding(name, False, str(error))
    finally:
        camera.close()


def _geometry(camera: Camera) -> str:
    description = geometry(camera)
    focal = (
        "focal length {fx:.1f}, {fy:.1f} pixels".format(**description["intrinsics"])
        if "intrinsics" in description
        else "intrinsics not known"
    )
    return f"{focal}; {'on the ' + description['mount']['parent'] if 'mount' in description else 'place not in the cell file'}"

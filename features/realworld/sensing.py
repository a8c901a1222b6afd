"""Read robot and cameras, and convert the readings to a policy's observation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.images import padded, picture_within, resized
from rlinf_vla.core.types import Observation
from rlinf_vla.features.realworld.camera_geometry import Calibrated, Intrinsics, Mount
from rlinf_vla.features.realworld.clock import Clock
from rlinf_vla.features.realworld.robot import Camera, Frame, Robot, RobotState, ToolState, Vector


@dataclass(frozen=True)
class Reading:
    """One reading of all sensors; ``number`` increases with every reading."""

    number: int
    state: RobotState
    frames: Mapping[str, Frame]

    @property
    def time(self) -> float:
        """Time of its oldest part, in clock seconds."""
        return min([self.state.time, *(frame.time for frame in self.frames.values())])

    def observation(self, instruction: str) -> Observation:
        """Return one row: images ``[1, H, W, 3]`` by camera, state ``[1, S]``."""
        images = {
            name: torch.from_numpy(np.array(frame.image))[None]
            for name, frame in self.frames.items()
        }
        state = proprioception(self.state).astype(np.float32)
        return Observation(images, torch.from_numpy(state)[None], [instruction])


def proprioception(state: RobotState) -> Vector:
    """Return the state ``[S]`` as the robot's action space describes it."""
    if not isinstance(state, ToolState):
        return state.joints
    return np.concatenate([state.pose.position, state.pose.quaternion, [state.gripper_width / 2]])


class ResizedCamera:
    """Implements ``Camera``: resize another camera's images to the size that the policy needs.

    ``bars``: as of ``PolicySpec``. ``start`` raises UserError if it is None and the camera's images
    are smaller.
    """

    def __init__(self, camera: Camera, size: tuple[int, int], bars: float | None = None) -> None:
        self.name = camera.name
        self._camera = camera
        self._size = size
        self._bars = bars
        self._taken: Frame | None = None
        self._frame: Frame | None = None

    def start(self) -> None:
        self._camera.start()
        shape = self._camera.latest().image.shape[:2]
        size = self._size
        if self._bars is None and (shape[0] < size[0] or shape[1] < size[1]):
            raise UserError(
                f"the policy's image {self.name!r} is {size[0]}x{size[1]} pixels, the camera's {shape[0]}x{shape[1]}"
            )

    @property
    def intrinsics(self) -> Intrinsics | None:
        """Return those of the resized images."""
        intrinsics = self._camera.intrinsics if isinstance(self._camera, Calibrated) else None
        (height, width) = self._size
        if intrinsics is None:
            return None
        if self._bars is None:
            return intrinsics.resized(width, height)
        (tall, wide), (top, left) = picture_within(
            (intrinsics.height, intrinsics.width), self._size, self._bars
        )
        inner = intrinsics.resized(wide, tall)
        return replace(inner, width=width, height=height, cx=inner.cx + left, cy=inner.cy + top)

    @property
    def mount(self) -> Mount | None:
        return self._camera.mount if isinstance(self._camera, Calibrated) else None

    def latest(self) -> Frame:
        frame = self._camera.latest()
        if self._frame is None or frame is not self._taken:
            image = torch.from_numpy(np.array(frame.image))[None]
            image = (
                resized(image, self._size)
                if self._bars is None
                else padded(image, self._size, self._bars)
            )
            self._taken = frame
            self._frame = Frame(frame.time, frame.number, image[0].numpy())
        return self._frame

    def close(self) -> None:
        self._camera.close()


class Sensors:
    """Read the robot and all of its cameras without waiting."""

    def __init__(self, robot: Robot, cameras: Sequence[Camera], clock: Clock) -> None:
        self._robot = robot
        self._cameras = cameras
        self._clock = clock
        self.count = 0
        """Number of observations so far, and the number of the next one."""

    def read(
        self, time: Callable[[str, float], None], age: Callable[[str, float], None]
    ) -> Reading:
        """Return the newest reading, and report durations and ages in seconds.

        ``time`` gets the duration of each section, ``age`` the age of each part. Raises RobotError,
        or CameraError if an image is too old or frozen.
        """
        began = self._clock.now()
        state = self._robot.observe()
        looked = self._clock.now()
        frames = {camera.name: camera.latest() for camera in self._cameras}
        ended = self._clock.now()
        time("observe", looked - began)
        if self._cameras:
            time("camera", ended - looked)
        for name, moment in (
            ("state", state.time),
            *((name, frame.time) for name, frame in frames.items()),
        ):
            age(name, ended - moment)
        self.count += 1
        return Reading(self.count - 1, state, frames)

"""Where a camera is and how it projects; standard library only.

A camera's frame is the optical one: x to the right in the image, y down, z forwards.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, runtime_checkable

BASE, FLANGE = PARENTS = ("base", "flange")


@dataclass(frozen=True)
class Intrinsics:
    """Pinhole model for images of one size. Pixels; the centre of the first pixel is at 0, 0."""

    width: int
    height: int
    fx: float
    fy: float
    cx: float
    cy: float
    distortion: str = "none"
    """Name of the distortion's model, as the driver gives it."""
    coefficients: tuple[float, ...] = ()
    """Of the distortion; none for a pinhole."""

    def resized(self, width: int, height: int) -> Intrinsics:
        """Return the model of the whole image scaled to another size."""
        x, y = width / self.width, height / self.height
        cx, cy = (self.cx + 0.5) * x - 0.5, (self.cy + 0.5) * y - 0.5
        return replace(
            self, width=width, height=height, fx=self.fx * x, fy=self.fy * y, cx=cx, cy=cy
        )


@dataclass(frozen=True)
class Mount:
    """Pose of a camera's frame in the frame of the arm's base or flange."""

    parent: str
    """One of PARENTS."""
    position_m: tuple[float, ...]
    quaternion_wxyz: tuple[float, ...]


@runtime_checkable
class Calibrated(Protocol):
    """A camera that knows its geometry, once it is started; None: not known."""

    @property
    def intrinsics(self) -> Intrinsics | None: ...

    @property
    def mount(self) -> Mount | None: ...


def geometry(camera: object) -> dict[str, Any]:
    """Return what ``camera`` knows of ``intrinsics`` and ``mount``, as JSON values."""
    fields = (
        {"intrinsics": camera.intrinsics, "mount": camera.mount}
        if isinstance(camera, Calibrated)
        else {}
    )
    return {name: asdict(value) for name, value in fields.items() if value is not None}

"""What the numbers of actions, states and images mean, for a policy and for an environment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ToolUnits:
    """Units of actions ``(dx, dy, dz, gripper)`` or ``(dx, dy, dz, rx, ry, rz, gripper)``.

    An action of 1 moves the tool's target so far per control step; see docs/conventions.md.
    """

    translation_m: float
    """Metres along an axis of the robot's base."""
    rotation_rad: float = 0.0
    """Radians, right-handed, about an axis of the robot's base."""


@dataclass(frozen=True)
class Convention:
    """Known meanings. A policy whose convention differs from its environment's is refused.

    None: not known, and so not compared.
    """

    tool: ToolUnits | None = None
    gripper: str | None = None
    """``open_positive``: +1 opens, -1 closes; ``close_positive``: the opposite; ``zero_to_one``: 0
    closes, 1 opens."""
    state: str | None = None
    """``quaternion``: as docs/conventions.md; ``axis_angle``: position, rotation vector and both
    fingers; ``qpos``: the positions of all joints."""
    images: str | None = None
    """``upright``; ``rot180``: LIBERO's images rotated by 180 degrees, which are mirrored;
    ``none``: as LIBERO renders them, upside down."""
    jpeg: bool = False
    """Of a policy: it reads images after a JPEG round trip (``core/jpeg.py``), as they are in RLDS
    data. Environments show them beside the others: ``VectorEnv.add_jpeg``."""


def common(tool: ToolUnits) -> Convention:
    """Return the convention of docs/conventions.md."""
    return Convention(tool, "open_positive", "quaternion", "upright")

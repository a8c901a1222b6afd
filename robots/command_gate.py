"""Check each outgoing command against every limit, independently of the code that generates it."""

from __future__ import annotations

import math

from rlinf_vla.core import rotations
from rlinf_vla.core.rotations import Quaternion, Triple
from rlinf_vla.features.realworld.robot import ToolTarget

from .cell import Cell

TRANSLATION = (
    "max_speed_m_s",
    "max_acceleration_m_s2",
    "max_jerk_m_s3",
    "max_translation_per_step_m",
    "max_translation_per_second_m",
)
ROTATION = (
    "max_rotation_speed_rad_s",
    "max_rotation_acceleration_rad_s2",
    "max_rotation_jerk_rad_s3",
    "max_rotation_per_step_rad",
    "max_rotation_per_second_rad",
)
_BOX = ("workspace_x_m", "workspace_y_m", "workspace_z_m")
_ZERO: Triple = (0.0, 0.0, 0.0)
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9
"""Tolerances for float rounding: a third difference divides the error by the tick cubed."""


class CommandGate:
    """Check commands by finite differences, from the limits and earlier commands alone."""

    def __init__(self, cell: Cell) -> None:
        self._tick_s = 1 / cell.servo_hz
        self._box = [(key, *getattr(cell, key)) for key in _BOX]
        self._to_reference = rotations.inverse(cell.reference)
        self._tilt = math.radians(cell.max_tilt_deg)
        self._twist = math.radians(cell.max_twist_deg)
        self._widths = cell.gripper_width_m
        self._moving = _Motion(TRANSLATION, cell)
        self._turning = _Motion(ROTATION, cell)
        self._position: list[float] = []
        self._quaternion: Quaternion = rotations.IDENTITY

    def rest(self, at: ToolTarget) -> None:
        """Restart the checks from standstill ``at`` this target."""
        self._position = at.pose.position.tolist()
        self._quaternion = rotations.unit(at.pose.quaternion.tolist())
        self._moving.rest()
        self._turning.rest()

    def check(self, command: ToolTarget) -> str | None:
        """Return the limit that ``command``, one tick after the last, violates, or None.

        A command that passes is recorded as sent; one that is refused is ignored.
        """
        position, quaternion = command.pose.position.tolist(), command.pose.quaternion.tolist()
        if (
            not math.isfinite(sum(position) + sum(quaternion))
            or abs(math.hypot(*quaternion) - 1) > _RELATIVE
        ):
            return "the command is not a valid pose"
        x, y, z = position
        wrong = self._place(position, quaternion, command.gripper_width)
        if wrong is not None:
            return wrong
        before = self._position
        moved = (x - before[0], y - before[1], z - before[2])
        turned = rotations.to_vector(
            rotations.multiply(quaternion, rotations.inverse(self._quaternion))
        )
        wrong = self._moving.check(moved, self._tick_s) or self._turning.check(turned, self._tick_s)
        if wrong is None:
            self._position = position
            self._quaternion = quaternion
        return wrong

    def _place(
        self, position: list[float], quaternion: list[float], width: float | None
    ) -> str | None:
        for at, (key, low, high) in zip(position, self._box, strict=True):
            if not low - _ABSOLUTE <= at <= high + _ABSOLUTE:
                return f"{key}: a command of {at:.6g} violates the limit"
        turn = rotations.multiply(self._to_reference, quaternion)
        tilt = 2 * math.asin(min(1.0, math.hypot(turn[1], turn[2])))
        if not tilt <= self._tilt + _RELATIVE:
            return f"max_tilt_deg: a command of {math.degrees(tilt):.6g} violates the limit"
        twist = abs(rotations.to_vector(turn)[2])
        if not twist <= self._twist + _RELATIVE:
            return f"max_twist_deg: a command of {math.degrees(twist):.6g} violates the limit"
        if width is not None and not self._widths[0] <= width <= self._widths[1]:
            return f"gripper_width_m: a command of {width:.6g} violates the limit"
        return None


class _Motion:
    """Velocity and acceleration of the last command, and distances per tick in the last second."""

    def __init__(self, keys: tuple[str, ...], cell: Cell) -> None:
        self._limits = [(key, getattr(cell, key)) for key in keys]
        self._second = round(cell.servo_hz)
        self._step = cell.ticks_per_step
        self._ways: list[float] = []
        self.rest()

    def rest(self) -> None:
        self._velocity = self._acceleration = _ZERO

    def check(self, moved: Triple, tick_s: float) -> str | None:
        velocity = (moved[0] / tick_s, moved[1] / tick_s, moved[2] / tick_s)
        acceleration = _slope(velocity, self._velocity, tick_s)
        jerk = _slope(acceleration, self._acceleration, tick_s)
        ways = [*self._ways[1 - self._second :], math.hypot(*moved)]
        magnitudes = (
            math.hypot(*velocity),
            math.hypot(*acceleration),
            math.hypot(*jerk),
            sum(ways[-self._step :]),
            sum(ways),
        )
        for value, (key, limit) in zip(magnitudes, self._limits, strict=True):
            if not value <= limit * (1 + _RELATIVE) + _ABSOLUTE:
                return f"{key}: a command of {value:.6g} violates the limit"
        self._velocity = velocity
        self._acceleration = acceleration
        self._ways = ways
        return None


def _slope(after: Triple, before: Triple, tick_s: float) -> Triple:
    return (
        (after[0] - before[0]) / tick_s,
        (after[1] - before[1]) / tick_s,
        (after[2] - before[2]) / tick_s,
    )

"""Limits and settings of arms that are moved by their joints, in the units of their driver.

A cell file gives every value; none has a default. Lists have one number per joint, in the order of
``joints``. The allowed ranges only exclude what cannot be meant.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.features.realworld.action_space import JointSpace
from rlinf_vla.features.realworld.robot import CellError, RobotSpec

from .arm_cell import SLOWEST_STOP_S, ArmCell, check_timing, number, unbounded
from .smoothing import Windows

ANY = 0
"""Length of a list that ``check`` compares with ``joints``."""
_FOLLOWING_S = 0.1
"""Lag of the measured joints behind the command: of an SO-101 at the gains that LeRobot sets, in
simulation; not measured on hardware."""


def _each(low: float, high: float) -> tuple[float, ...]:
    values: tuple[float, ...] = number(low, high, ANY)
    return values


@dataclass(frozen=True)
class JointCell(ArmCell):
    """Each field is a key of the cell file, with its range as metadata. ``check`` does the rest."""

    joints: tuple[str, ...] = unbounded()
    """Names of the joints, as the robot calls them."""
    grippers: tuple[str, ...] = unbounded()
    """Those of them that are grippers."""
    lower: tuple[float, ...] = _each(-1e4, 1e4)
    upper: tuple[float, ...] = _each(-1e4, 1e4)
    """Range of the commands."""
    home: tuple[float, ...] = _each(-1e4, 1e4)
    home_speed: tuple[float, ...] = _each(1e-3, 1e4)
    """Largest speed during homing."""
    action_step: tuple[float, ...] = _each(1e-3, 1e4)
    """Change of a joint by a relative action of 1."""
    max_speed: tuple[float, ...] = _each(1e-3, 1e4)
    max_acceleration: tuple[float, ...] = _each(1e-2, 1e6)
    max_jerk: tuple[float, ...] = _each(1e-1, 1e8)
    max_lead: tuple[float, ...] = _each(1e-3, 1e4)
    """Distance of the goal ahead of the measured joint; bounds the motor's torque."""
    max_deviation: tuple[float, ...] = _each(1e-3, 1e4)
    """A measured joint that is further from its command for ``max_deviation_s`` is a fault.
    Grippers are excepted: they may hold something."""
    max_deviation_s: float = number(0.05, 5)

    def space(self, relative: bool) -> JointSpace:
        return JointSpace(
            tuple(self.joints),
            self.lower,
            self.upper,
            self.action_step,
            tuple(self.grippers),
            relative,
        )

    def spec(self, relative: bool) -> RobotSpec:
        return RobotSpec(self.name, self.control_hz, self.lag_s, self.space(relative))

    @property
    def is_gripper(self) -> NDArray[np.bool_]:
        return self.space(True).is_gripper

    @property
    def windows(self) -> Windows:
        """Averaging windows that keep acceleration and jerk of each joint within limits."""
        return Windows.within(
            1 / self.servo_hz,
            zip(self.max_speed, self.max_acceleration, self.max_jerk, strict=True),
        )

    @property
    def lag_s(self) -> float:
        """Longest time from a goal to the unobstructed joints reaching it."""
        return 1 / self.control_hz + self.stop_time_s + _FOLLOWING_S


def check(cell: JointCell) -> None:
    """Raise CellError (key, what is wrong, the fix) if limits contradict each other."""
    check_timing(cell)
    for key in ("joints", "grippers"):
        names = getattr(cell, key)
        if (
            not isinstance(names, list | tuple)
            or not all(isinstance(name, str) for name in names)
            or len(set(names)) != len(names)
        ):
            raise CellError(f"{key}: {names!r} is not a list of different names")
    if not cell.joints:
        raise CellError("joints: is empty; name at least one")
    if unknown := set(cell.grippers) - set(cell.joints):
        raise CellError(f"grippers: {min(unknown)} is not in joints; add it there")
    for key in (
        "lower",
        "upper",
        "home",
        "home_speed",
        "action_step",
        "max_speed",
        "max_acceleration",
        "max_jerk",
        "max_lead",
        "max_deviation",
    ):
        if (count := len(getattr(cell, key))) != len(cell.joints):
            raise CellError(
                f"{key}: has {count} numbers, joints has {len(cell.joints)} names; give one per joint"
            )
    hz = cell.control_hz
    ahead = np.array(cell.action_step) * cell.control_hz * cell.lag_s
    for joint, name in enumerate(cell.joints):
        low, high, home = cell.lower[joint], cell.upper[joint], cell.home[joint]
        if low >= high:
            raise CellError(
                f"lower: {name} at {low:g} is not below its upper {high:g}; exchange them"
            )
        if not low <= home <= high:
            raise CellError(f"home: {name} at {home:g} is outside [{low:g}, {high:g}]; move it")
        if name in cell.grippers:
            continue
        if cell.action_step[joint] * hz > cell.max_speed[joint] * (1 + 1e-9):
            speed = cell.action_step[joint] * hz
            raise CellError(
                f"max_speed: {name}'s {cell.max_speed[joint]:g} is below {speed:g}, that of full actions; lower action_step"
            )
        if ahead[joint] > cell.max_lead[joint]:
            raise CellError(
                f"max_lead: {name}'s {cell.max_lead[joint]:g} is below {ahead[joint]:.1f}, the lead of full actions; raise it"
            )
    if cell.stop_time_s > SLOWEST_STOP_S:
        raise CellError(
            f"max_acceleration: a stop takes {cell.stop_time_s:.1f} s, more than {SLOWEST_STOP_S:g} s; raise it, or max_jerk"
        )

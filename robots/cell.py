"""Limits and settings of one arm at its place of work, the cell.

A cell file (``cell_file.py``) gives every value; none has a default. The allowed range of each key
is the Franka Research 3's where Franka documents it (frankarobotics.github.io/docs: robot limits,
impedance ranges, Franka Hand), and our own choice elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlinf_vla.core import rotations
from rlinf_vla.features.realworld.action_space import ToolSpace
from rlinf_vla.features.realworld.camera_geometry import Mount
from rlinf_vla.features.realworld.robot import CellError, RobotSpec, ToolPose

from . import kinematics
from .arm_cell import SLOWEST_STOP_S, ArmCell, check_timing, number, unbounded
from .smoothing import Windows


@dataclass(frozen=True)
class Cell(ArmCell):
    """Each field is a key of the cell file, with its range as metadata. ``check`` does the rest."""

    realtime: str = unbounded()
    """enforce: refuse a kernel that is not real-time. ignore: for simulated arms."""
    cameras: Mapping[str, Mount] = unbounded()
    """Where the cameras are, by name; empty if that is not known."""

    action_translation_m: float = number(1e-4, 0.1)
    """Translation of an action of 1 in dx, dy or dz."""
    action_rotation_rad: float = number(1e-3, 0.5)

    tool_position_m: tuple[float, ...] = number(-0.5, 0.5, 3)
    """Tool centre point in the flange's frame; must agree with Desk."""
    tool_quaternion_wxyz: tuple[float, ...] = number(-1, 1, 4)
    home_joints_rad: tuple[float, ...] = number(-4, 5, 7)
    home_speed_rad_s: float = number(0.01, 1)
    """Speed of the fastest joint during homing."""

    workspace_x_m: tuple[float, ...] = number(-1.5, 1.5, 2)
    workspace_y_m: tuple[float, ...] = number(-1.5, 1.5, 2)
    workspace_z_m: tuple[float, ...] = number(-1.0, 2.0, 2)
    orientation_axis: tuple[float, ...] = number(-1, 1, 3)
    """Axis of the cone in which the tool's z axis must stay, base frame, unit length."""
    max_tilt_deg: float = number(1, 90)
    """Half-angle of the cone."""
    max_twist_deg: float = number(1, 150)
    """Rotation about the axis, each way from home; under 180 to exclude the long way round."""

    max_translation_per_step_m: float = number(1e-4, 0.3)
    max_rotation_per_step_rad: float = number(1e-3, 1)
    max_translation_per_second_m: float = number(1e-3, 3)
    max_rotation_per_second_rad: float = number(1e-2, 2.5)
    max_speed_m_s: float = number(1e-3, 3)
    max_acceleration_m_s2: float = number(1e-2, 9)
    max_jerk_m_s3: float = number(0.1, 4500)
    max_rotation_speed_rad_s: float = number(1e-2, 2.5)
    max_rotation_acceleration_rad_s2: float = number(0.1, 17)
    max_rotation_jerk_rad_s3: float = number(1, 8500)

    joint_margin_rad: float = number(0.02, 0.5)
    max_joint_speed_rad_s: float = number(0.01, 2.62)
    max_lead_m: float = number(0.005, 0.2)
    """Distance of the goal ahead of the measured tool."""
    max_lead_rad: float = number(0.02, 0.8)
    max_force_n: float = number(1, 100)
    max_torque_n_m: float = number(0.5, 30)
    stiffness_n_m: float = number(10, 3000)
    rotation_stiffness_n_m_rad: float = number(1, 300)

    gripper_width_m: tuple[float, ...] = number(0, 0.08, 2)
    """Narrowest and widest opening."""
    gripper_speed_m_s: float = number(0.001, 0.1)
    gripper_force_n: float = number(1, 70)

    @property
    def spec(self) -> RobotSpec:
        return RobotSpec(self.name, self.control_hz, self.lag_s, self.space)

    @property
    def space(self) -> ToolSpace:
        return ToolSpace(
            self.action_translation_m, self.action_rotation_rad, self.gripper_width_m[1]
        )

    @property
    def arm(self) -> kinematics.FrankaKinematics:
        return kinematics.FrankaKinematics(self.tool_position_m, self.tool_quaternion_wxyz)

    @property
    def home(self) -> ToolPose:
        return self.arm.pose(np.array(self.home_joints_rad))

    @property
    def reference(self) -> rotations.Quaternion:
        """Centre orientation of cone and twist.

        It is home, rotated by the smallest angle that aligns the tool with the axis.
        """
        home = self.home.quaternion.tolist()
        return rotations.multiply(
            rotations.between(rotations.matrix(home)[:, 2].tolist(), self.orientation_axis), home
        )

    @property
    def step_m(self) -> float:
        """Longest translation per goal: the tighter of step limit and speed limit."""
        return min(self.max_translation_per_step_m, self.max_speed_m_s / self.control_hz)

    @property
    def step_rad(self) -> float:
        return min(self.max_rotation_per_step_rad, self.max_rotation_speed_rad_s / self.control_hz)

    @property
    def windows(self) -> Windows:
        """Averaging windows that keep acceleration and jerk within limits.

        Raises ValueError if no windows do.
        """
        return Windows.of(
            1 / self.servo_hz,
            (self.step_m * self.control_hz, self.max_acceleration_m_s2, self.max_jerk_m_s3),
            (
                self.step_rad * self.control_hz,
                self.max_rotation_acceleration_rad_s2,
                self.max_rotation_jerk_rad_s3,
            ),
        )

    @property
    def lag_s(self) -> float:
        """Longest time from a goal to the unobstructed tool reaching it.

        It includes the reference's travel, the averages and the lag of the impedance controller.
        """
        return 1 / self.control_hz + self.stop_time_s + SPRINGS_S

    @property
    def stop_distance_m(self) -> float:
        """Longest distance that the command still moves after the last goal is dropped."""
        return self.step_m * self.control_hz * self.stop_time_s / 2


SPRINGS_S = 0.05
"""Lag of the measured tool behind the command, under the impedance controller.

At 0.2 m/s and 1500 N/m, MuJoCo's arm is 11 mm behind after the start, then 3 mm.
"""


def check(cell: Cell) -> None:
    """Raise CellError (key, what is wrong, the fix) if limits contradict each other or the arm."""
    if cell.realtime not in ("enforce", "ignore"):
        raise CellError(f"realtime: {cell.realtime!r} is not known; one of enforce, ignore")
    check_timing(cell)
    for key in ("orientation_axis", "tool_quaternion_wxyz"):
        if abs(math.hypot(*getattr(cell, key)) - 1) > 1e-3:
            raise CellError(
                f"{key}: {list(getattr(cell, key))} is not of length 1; divide it by its length"
            )
    _check_steps(cell)
    _check_space(cell)
    try:
        seconds = cell.stop_time_s
    except ValueError as error:
        raise CellError(
            f"max_rotation_acceleration_rad_s2: {error}; raise it, or lower max_rotation_speed_rad_s"
        ) from None
    if seconds > SLOWEST_STOP_S:
        raise CellError(
            f"max_acceleration_m_s2: with these accelerations and jerks a stop takes {seconds:.1f} s, longer than {SLOWEST_STOP_S:g} s; "
            "raise them (or the rotation's), or lower max_speed_m_s"
        )
    _check_full_actions(cell)


def _check_steps(cell: Cell) -> None:
    for key, limit in (
        ("action_translation_m", "max_translation_per_step_m"),
        ("max_translation_per_step_m", "max_translation_per_second_m"),
        ("action_rotation_rad", "max_rotation_per_step_rad"),
        ("max_rotation_per_step_rad", "max_rotation_per_second_rad"),
    ):
        if getattr(cell, key) > getattr(cell, limit):
            raise CellError(
                f"{key}: {getattr(cell, key):g} is above {limit} {getattr(cell, limit):g}; lower it"
            )


def _check_full_actions(cell: Cell) -> None:
    """Raise CellError if consecutive full-size actions would cause interventions."""
    for key, speeds, lead, unit in (
        (
            "action_translation_m",
            ("max_speed_m_s", "max_translation_per_second_m"),
            "max_lead_m",
            "m",
        ),
        (
            "action_rotation_rad",
            ("max_rotation_speed_rad_s", "max_rotation_per_second_rad"),
            "max_lead_rad",
            "rad",
        ),
    ):
        speed = getattr(cell, key) * cell.control_hz
        for limit in speeds:
            if speed > getattr(cell, limit):
                raise CellError(
                    f"{limit}: {getattr(cell, limit):g} is below {speed:g} {unit}/s, the speed of full actions; lower {key}"
                )
        ahead = speed * cell.lag_s
        if ahead > getattr(cell, lead):
            raise CellError(
                f"{lead}: {getattr(cell, lead):g} is below {ahead:.3f} {unit}, the lead of full actions over the arm, which lags by "
                f"{cell.lag_s:.2f} s; raise it, or lower {key}"
            )


def _check_space(cell: Cell) -> None:
    boxes = {
        key: getattr(cell, key)
        for key in ("workspace_x_m", "workspace_y_m", "workspace_z_m", "gripper_width_m")
    }
    for key, (low, high) in boxes.items():
        if low >= high:
            raise CellError(
                f"{key}: [{low:g}, {high:g}] is reversed; write the smaller number first"
            )
    reach = kinematics.REACH_M + math.hypot(*cell.tool_position_m)
    for key, middle in (
        ("workspace_x_m", 0.0),
        ("workspace_y_m", 0.0),
        ("workspace_z_m", kinematics.SHOULDER_M),
    ):
        (low, high) = boxes[key]
        nearest = middle - reach
        furthest = middle + reach
        if low < nearest or high > furthest:
            raise CellError(
                f"{key}: [{low:g}, {high:g}] is beyond the arm's reach, [{nearest:.2f}, {furthest:.2f}]; tighten it"
            )
    lower = kinematics.LOWER + cell.joint_margin_rad
    upper = kinematics.UPPER - cell.joint_margin_rad
    for joint, (angle, low, high) in enumerate(
        zip(cell.home_joints_rad, lower, upper, strict=True), 1
    ):
        if not low <= angle <= high:
            raise CellError(
                f"home_joints_rad: joint {joint} at {angle:g} is outside [{low:.4f}, {high:.4f}], its limits less joint_margin_rad; move it"
            )
    for key, at in zip(boxes, cell.home.position, strict=False):
        low, high = boxes[key]
        if not low <= at <= high:
            raise CellError(
                f"home_joints_rad: the tool is then at {at:.3f} m, outside {key} [{low:g}, {high:g}]; move home or the box"
            )
    points = rotations.matrix(cell.home.quaternion.tolist())[:, 2]
    tilt = math.degrees(math.acos(min(1.0, float(points @ np.array(cell.orientation_axis)))))
    if tilt > cell.max_tilt_deg:
        raise CellError(
            f"home_joints_rad: the tool is then {tilt:.1f} deg off orientation_axis, above max_tilt_deg {cell.max_tilt_deg:g}"
        )

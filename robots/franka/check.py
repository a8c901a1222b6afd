"""Checks of ``rlinf-vla doctor`` and ``rlinf-vla robot check``; none moves the arm."""

from __future__ import annotations

import importlib
import itertools
import math
import time
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from rlinf_vla.core.rotations import Triple
from rlinf_vla.features.realworld.robot import Camera, Finding, RobotError

from .. import kinematics
from ..cameras import check_camera
from ..cell import Cell
from ..extra import INSTALL, LIBUSB
from ..pace import LEAST_S
from ..workspace import BOX, Workspace, along
from .client import FrankaRobot

_REALTIME = Path("/sys/kernel/realtime")
"""Exists on kernels with PREEMPT_RT."""


def realtime() -> bool:
    return _REALTIME.exists() and _REALTIME.read_text().strip() == "1"


def of_an_arm() -> Iterator[Finding]:
    yield package("franky", "franky", "franky-control")
    if find_spec("franky") is not None:
        words = (
            "real time (PREEMPT_RT)"
            if realtime()
            else "optional: no real time, which a real arm needs and a simulated one does not"
        )
        yield Finding("real-time kernel", realtime(), words, "boot a kernel with PREEMPT_RT")
    yield package("OpenCV", "cv2", "opencv-python")
    yield package("RealSense", "pyrealsense2", "pyrealsense2")


def package(name: str, module: str, distribution: str) -> Finding:
    if find_spec(module) is None:
        return Finding(name, False, "optional: not installed", INSTALL)
    try:
        importlib.import_module(module)
    except ImportError as error:  # installed but unusable
        text = " ".join(str(error).split())
        return Finding(
            name,
            False,
            f"optional: cannot be imported ({text})",
            LIBUSB if "libusb" in text else INSTALL,
        )
    return Finding(name, True, version(distribution))


CONNECT_S = 60.0


def findings(robot: FrankaRobot, cameras: list[Camera]) -> Iterator[Finding]:
    cell = robot.cell
    yield from _limits(cell)
    needed = (
        "which a real arm needs" if cell.realtime == "enforce" else "which this cell does not need"
    )
    yield Finding(
        "kernel",
        realtime() or cell.realtime == "ignore",
        "real time (PREEMPT_RT)" if realtime() else f"no real time, {needed}",
    )
    begun = time.monotonic()
    try:
        robot.connect(CONNECT_S)
        yield Finding(
            "connection",
            True,
            f"{robot.found['host']} in {time.monotonic() - begun:.1f} s; {robot.found['versions']}",
        )
        yield from _state(robot)
        for camera in cameras:
            yield check_camera(camera)
    except RobotError as error:
        yield Finding("connection", False, str(error))
    finally:
        robot.close()


def _limits(cell: Cell) -> Iterator[Finding]:
    box = ", ".join(
        f"{axis} {low:g} to {high:g}" for axis, (low, high) in zip("xyz", _box(cell), strict=True)
    )
    yield Finding("workspace", True, f"{box} m; tilt up to {cell.max_tilt_deg:g} deg")
    yield _reach(cell)
    yield Finding(
        "limits",
        True,
        f"{cell.max_speed_m_s:g} m/s, {cell.max_acceleration_m_s2:g} m/s2, {cell.max_force_n:g} N; a stop takes at most "
        f"{cell.stop_time_s:.2f} s and {100 * cell.stop_distance_m:.1f} cm; goals at "
        f"{cell.control_hz:g} Hz, commands at {cell.servo_hz:g} Hz",
    )


def _box(cell: Cell) -> list[tuple[float, float]]:
    return [getattr(cell, key) for key in BOX]


def _reach(cell: Cell) -> Finding:
    beyond = unreachable(cell)
    examples = {why: position for position, why in reversed(beyond.items())}
    named = "; ".join(f"x {x:g}, y {y:g}, z {z:g} m: {why}" for why, (x, y, z) in examples.items())
    parts = f"{len(beyond)} of 125 points in the box are out of reach, goals stop short of them; {named}"
    return Finding("reach", True, parts if beyond else "the whole box")


def _state(robot: FrankaRobot) -> Iterator[Finding]:
    until = time.monotonic() + LEAST_S + 0.5
    while time.monotonic() < until:
        time.sleep(0.1)
        state = robot.observe()
    needed = (
        ""
        if state.slow is None
        else ": this machine is too slow; close other programs, or expect faults of force and lateness"
    )
    yield Finding(
        "clock", state.slow is None, f"the arm's runs at {state.pace:.2f} of real time{needed}"
    )
    yield Finding("state", state.fault is None, state.fault or "no fault")
    x, y, z = state.pose.position
    inside = all(
        low <= at <= high for at, (low, high) in zip((x, y, z), _box(robot.cell), strict=True)
    )
    yield Finding(
        "tool",
        inside,
        f"x {x:.3f}, y {y:.3f}, z {z:.3f} m{'' if inside else ', outside the workspace: `rlinf-vla robot home`'}",
    )
    force = math.hypot(*state.wrench[:3])
    yield Finding(
        "force",
        force < robot.cell.max_force_n,
        f"{force:.1f} N measured; {robot.cell.max_force_n:g} N stop the arm",
    )
    widest = float(robot.found["widest"])
    width = robot.cell.gripper_width_m[1]
    detail = f"{1000 * state.gripper_width:.0f} mm open, {1000 * widest:.0f} mm at most"
    homed = widest > width - 0.005
    yield Finding(
        "gripper",
        homed,
        detail
        if homed
        else f"{detail}, but the cell has {1000 * width:.0f} mm: home the fingers in Desk",
    )


_LEVELS = 5
"""Points along each axis of the box, walls included."""
_STEP_M = 0.02
_REACHED = 1e-4
_ATTEMPTS = 20


def unreachable(cell: Cell) -> dict[Triple, str]:
    """Return the unreachable ones of 125 points of the box (m, base frame), each with the reason.

    Goals stop short of them. The tool points along ``orientation_axis``. The arm moves straight
    from home, with joints predicted as in the safety filter.
    """
    levels = [np.linspace(low, high, _LEVELS).round(4).tolist() for low, high in _box(cell)]
    arm = cell.arm
    space = Workspace(cell)
    return {
        position: why
        for position in itertools.product(*levels)
        if (why := _why_not(cell, arm, space, position)) is not None
    }


def _why_not(
    cell: Cell, arm: kinematics.FrankaKinematics, space: Workspace, position: Triple
) -> str | None:
    begin, turn = space.place(cell.home, (0.0, 0.0, 0.0))
    joints = np.array(cell.home_joints_rad)
    steps = max(1, math.ceil(math.dist(begin, position) / _STEP_M))
    for step in range(1, steps + 1):
        pose = space.pose(
            (along(begin, position, step / steps), along(turn, (0.0, 0.0, 0.0), step / steps))
        )
        solution = arm.reach(joints, pose, _REACHED, _ATTEMPTS)
        if solution is None:
            return "too far"
        joints = solution
    left = np.minimum(joints - kinematics.LOWER, kinematics.UPPER - joints)
    joint = int(left.argmin())
    return f"joint {joint + 1} at its limit" if left[joint] < cell.joint_margin_rad else None

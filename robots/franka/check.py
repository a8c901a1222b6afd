"""``rlinf-vla robot check``: check everything that a session needs, without moving the arm."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from rlinf_vla.core.robot import Camera, CameraError, Finding, RobotError

from .. import reachability
from ..cell import Cell
from .client import FrankaRobot
from .doctor import realtime

CONNECT_S = 60.0


def findings(robot: FrankaRobot, cameras: list[Camera]) -> Iterator[Finding]:
    cell = robot.cell
    yield from _limits(cell)
    needed = "which a real arm needs" if cell.realtime == "enforce" else "which this cell does not need"
    yield Finding("kernel", realtime() or cell.realtime == "ignore", "real time (PREEMPT_RT)" if realtime() else f"no real time, {needed}")
    begun = time.monotonic()
    try:
        robot.connect(CONNECT_S)
        yield Finding("connection", True, f"{robot.found['host']} in {time.monotonic() - begun:.1f} s; {robot.found['versions']}")
        yield from _state(robot)
        for camera in cameras:
            yield _camera(camera)
    except RobotError as error:
        yield Finding("connection", False, str(error))
    finally:
        robot.close()


def _limits(cell: Cell) -> Iterator[Finding]:
    box = ", ".join(f"{axis} {low:g} to {high:g}" for axis, (low, high) in zip("xyz", _box(cell), strict=True))
    yield Finding("workspace", True, f"{box} m; tilt up to {cell.max_tilt_deg:g} deg")
    yield _reach(cell)
    yield Finding(
        "limits",
        True,
        f"{cell.max_speed_m_s:g} m/s, {cell.max_acceleration_m_s2:g} m/s2, {cell.max_force_n:g} N; a stop takes at most "
        f"{cell.stop_time_s:.2f} s and {100 * cell.stop_distance_m:.1f} cm; goals at "
        f"{cell.control_hz:g} Hz, commands at {cell.servo_hz:g} Hz",
    )


def _reach(cell: Cell) -> Finding:
    beyond = reachability.beyond(cell)
    examples = {why: place for place, why in reversed(beyond.items())}
    named = "; ".join(f"x {x:g}, y {y:g}, z {z:g} m: {why}" for why, (x, y, z) in examples.items())
    parts = f"{len(beyond)} of 125 points in the box are out of reach, goals stop short of them; {named}"
    return Finding("reach", True, parts if beyond else "the whole box")


def _box(cell: Cell) -> tuple[tuple[float, ...], ...]:
    return cell.workspace_x_m, cell.workspace_y_m, cell.workspace_z_m


def _state(robot: FrankaRobot) -> Iterator[Finding]:
    state = robot.observe()
    yield Finding("state", state.fault is None, state.fault or "no fault")
    x, y, z = state.pose.position
    inside = all(low <= at <= high for at, (low, high) in zip((x, y, z), _box(robot.cell), strict=True))
    yield Finding("tool", inside, f"x {x:.3f}, y {y:.3f}, z {z:.3f} m{'' if inside else ', outside the workspace: `rlinf-vla robot home`'}")
    force = math.hypot(*state.wrench[:3])
    yield Finding("force", force < robot.cell.max_force_n, f"{force:.1f} N measured; {robot.cell.max_force_n:g} N stop the arm")
    widest, wanted = float(robot.found["widest"]), robot.cell.gripper_width_m[1]
    detail = f"{1000 * state.gripper_width:.0f} mm open, {1000 * widest:.0f} mm at most"
    homed = widest > wanted - 0.005
    yield Finding("gripper", homed, detail if homed else f"{detail}, but the cell has {1000 * wanted:.0f} mm: home the fingers in Desk")


def _camera(camera: Camera) -> Finding:
    name = f"camera {camera.name}"
    try:
        camera.start()
        frame = camera.latest()
        height, width, _ = frame.image.shape
        return Finding(name, True, f"{width}x{height}, {1000 * (time.monotonic() - frame.time):.0f} ms old")
    except CameraError as error:
        return Finding(name, False, str(error))
    finally:
        camera.close()

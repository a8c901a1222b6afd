"""Checks of ``rlinf-vla robot check`` for a LeRobot robot; none moves it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from rlinf_vla.features.realworld.robot import Camera, Finding, RobotError

from ..cameras import check_camera
from ..pace import LEAST_S
from .client import LeRobotRobot

CONNECT_S = 60.0


def findings(robot: LeRobotRobot, cameras: list[Camera]) -> Iterator[Finding]:
    cell = robot.cell
    rates = f"goals at {cell.control_hz:g} Hz, commands at {cell.servo_hz:g} Hz"
    yield Finding(
        "limits",
        True,
        f"{len(cell.joints)} joints; a stop takes at most {cell.stop_time_s:.2f} s; {rates}",
    )
    begun = time.monotonic()
    try:
        robot.connect(CONNECT_S)
        yield Finding(
            "connection",
            True,
            f"{robot.found['host']} in {time.monotonic() - begun:.1f} s; {robot.found['versions']}",
        )
        time.sleep(LEAST_S)
        state = robot.observe()
        yield Finding("state", state.fault is None, state.fault or "no fault")
        outside = [
            name
            for name, at, low, high in zip(
                cell.joints, state.joints, cell.lower, cell.upper, strict=True
            )
            if not low - 1 <= at <= high + 1
        ]
        stands = ", ".join(
            f"{name} {at:.1f}"
            for name, at in zip(cell.joints, np.round(state.joints, 1), strict=True)
        )
        beyond = (
            f"; outside the limits: {', '.join(outside)}: `rlinf-vla robot home`" if outside else ""
        )
        yield Finding("joints", not outside, stands + beyond)
        for camera in cameras:
            yield check_camera(camera)
    except RobotError as error:
        yield Finding("connection", False, str(error))
    finally:
        robot.close()

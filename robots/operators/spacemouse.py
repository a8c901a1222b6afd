"""Read a 3Dconnexion SpaceMouse by its raw HID reports (/dev/hidraw*). Not yet tested on hardware.

Reports: 1, translation as three little-endian int16 (right, towards the user, down), in newer
devices followed by the rotation; 2, rotation; 3, one bit per button. Full deflection is about 350
(spacenavd). A deflected device keeps sending reports, so one that falls silent (wireless, out of
range) counts as released. Releasing the left button toggles the gripper, releasing the right one
sends ``success``; pressing both sends ``pause`` at once. The terminal's keys (keyboard.py) send all
words too, but do not move the arm here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from rlinf_vla.features.realworld.robot import PAUSE, SUCCESS, Operator, RobotError

from . import keyboard
from .device_reader import RELEASED, Device, DeviceReader, Event

VENDORS = ("0000256F", "0000046D")
"""USB vendors: 3Dconnexion, and Logitech for older devices."""
FULL = 350.0
TRANSLATION, ROTATION, BUTTONS = 1, 2, 3
LEFT, RIGHT = 1, 2
SILENCE_S = 0.3
"""Silence after which the device counts as released; a deflected one reports about every 10 ms."""


class SpaceMouse(Device):
    """One SpaceMouse."""

    name = "spacemouse"
    refusal = "SpaceMouse {path}: {error.strerror}; a udev rule must let you read it"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._motion = [0.0] * 6
        self._chord = 0
        """Bits of all buttons pressed since none was pressed."""

    def events(self) -> Iterator[Event]:
        for report in self.reports(64, SILENCE_S):
            if not report:
                self._motion = [0.0] * 6
                yield RELEASED
            elif (event := self.parse(report)) is not None:
                yield event

    def parse(self, report: bytes) -> Event | None:
        """Return the event of one report, or None if it is irrelevant."""
        if not report:
            return None
        kind = report[0]
        data = report[1:]
        if kind == TRANSLATION and len(data) >= 6:
            self._motion[:3] = _axes(data)
            if len(data) >= 12:
                self._motion[3:] = _axes(data[6:])
        elif kind == ROTATION and len(data) >= 6:
            self._motion[3:] = _axes(data)
        elif kind == BUTTONS and data:
            return self._buttons(data[0] & (LEFT | RIGHT))
        else:
            return None
        return Event(motion=tuple(self._motion))

    def _buttons(self, pressed: int) -> Event | None:
        """Return the event of a button report.

        Two buttons never arrive in one report, so a single button acts only on release.
        """
        before = self._chord
        self._chord = self._chord | pressed if pressed else 0
        if self._chord == LEFT | RIGHT != before:
            return Event(word=PAUSE)
        if not pressed and before in (LEFT, RIGHT):
            return Event(toggles=before == LEFT, word=SUCCESS if before == RIGHT else None)
        return None


def _axes(data: bytes) -> list[float]:
    """Map device axes (right, towards the user, down) to robot axes (forward, left, up).

    The user stands behind the robot.
    """
    right, towards, down = (
        max(-1.0, min(1.0, value / FULL)) for value in struct.unpack_from("<hhh", data)
    )
    return [-towards, -right, -down]


def open_spacemouse(device: str | None, dimensions: int) -> Operator:
    paths = [Path(device)] if device is not None else _found()
    if not paths:
        raise RobotError(
            "session.operator=spacemouse: no 3Dconnexion hidraw device: plug one in, or set session.device=PATH"
        )
    mouse = SpaceMouse(paths[0])
    try:
        keys = keyboard.open_keyboard(None, dimensions)
    except RobotError:
        mouse.close()
        mouse.release()
        raise RobotError(
            "session.operator=spacemouse: its buttons cannot send resume, failure, acknowledge and quit, and there is no terminal whose "
            "keys could: start the session in a terminal, or use a gamepad"
        ) from None
    return DeviceReader(mouse, dimensions, keys)


def _found() -> list[Path]:
    devices = []
    for path in sorted(Path("/sys/class/hidraw").glob("hidraw*")):
        about = (
            (path / "device" / "uevent").read_text()
            if (path / "device" / "uevent").exists()
            else ""
        )
        vendor = next(
            (line.split(":")[1] for line in about.splitlines() if line.startswith("HID_ID=")), ""
        )
        if vendor.upper() in VENDORS and "space" in about.lower():
            devices.append(Path("/dev") / path.name)
    return devices

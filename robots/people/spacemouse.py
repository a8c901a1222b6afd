"""A 3Dconnexion SpaceMouse by its raw HID reports (/dev/hidraw*). Not yet tried on hardware.

Reports: 1, translation as three little-endian int16 (right, towards the user, down), in newer devices followed by the rotation; 2,
rotation; 3, a bit for each button. Full deflection is about 350 (spacenavd). One that is pushed goes on reporting: where it falls silent (a
wireless one out of reach), it counts as let go. The left button moves the gripper, the right one says success, when they are let go; both:
pause, at once. All words can be said by the terminal's keys (keyboard.py), too, which move nothing here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from rlinf_vla.robot import PAUSE, SUCCESS, Action, Person, RobotError

from . import keyboard
from .hands import RELEASED, Event, Hands, Source

VENDORS = ("0000256F", "0000046D")
"""3Dconnexion, and Logitech, which made the older ones."""
FULL = 350.0
TRANSLATION, ROTATION, BUTTONS = 1, 2, 3
LEFT, RIGHT = 1, 2
SILENCE_S = 0.3
"""Far above the time between two reports of a mouse that is pushed (some 10 ms)."""


class SpaceMouse:
    name = "spacemouse"

    def __init__(self, path: Path) -> None:
        try:
            self._source = Source(path)
        except OSError as error:
            raise RobotError(f"SpaceMouse {path}: {error.strerror}; a udev rule must let you read it") from None
        self._motion = [0.0] * 6
        self._chord = 0
        """Buttons that were pressed since none was."""

    def events(self) -> Iterator[Event]:
        for report in self._source.reports(64, SILENCE_S):
            if not report:
                self._motion = [0.0] * 6
                yield RELEASED
            elif (event := self.parse(report)) is not None:
                yield event

    def parse(self, report: bytes) -> Event | None:
        """None where it says nothing to us."""
        if not report:
            return None
        kind, data = report[0], report[1:]
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
        """Two are never pressed in one report: what one says is known only when it is let go."""
        before, self._chord = self._chord, self._chord | pressed if pressed else 0
        if self._chord == LEFT | RIGHT != before:
            return Event(word=PAUSE)
        if not pressed and before in (LEFT, RIGHT):
            return Event(toggles=before == LEFT, word=SUCCESS if before == RIGHT else None)
        return None

    def close(self) -> None:
        self._source.end()


def _axes(data: bytes) -> list[float]:
    """From the device's axes (right, towards the user, down) to the robot's (forward, left, up); the user stands behind the robot."""
    right, towards, down = (max(-1.0, min(1.0, value / FULL)) for value in struct.unpack_from("<hhh", data))
    return [-towards, -right, -down]


class MouseAndKeys:
    """Implements ``Person``: what is done is the mouse's; what is said, either's."""

    def __init__(self, mouse: Person, keys: Person) -> None:
        self._mouse, self._keys = mouse, keys

    @property
    def name(self) -> str:
        return self._mouse.name

    def action(self, hand: float) -> Action | None:
        return self._mouse.action(hand)

    def words(self) -> list[str]:
        return [*self._mouse.words(), *self._keys.words()]

    def close(self) -> None:
        self._mouse.close()
        self._keys.close()


def open_spacemouse(device: str | None, dimensions: int) -> Person:
    found = [Path(device)] if device is not None else _found()
    if not found:
        raise RobotError("session.person=spacemouse: no hidraw device of 3Dconnexion: plug one in, or give session.device=PATH")
    mouse = Hands(SpaceMouse(found[0]), dimensions)
    try:
        keys = keyboard.open_keyboard(None, dimensions)
    except RobotError:
        mouse.close()
        raise RobotError(
            "session.person=spacemouse: its buttons cannot say resume, failure, acknowledge and quit, and there is no terminal whose keys "
            "could: begin the session in one, or use a gamepad"
        ) from None
    return MouseAndKeys(mouse, keys)


def _found() -> list[Path]:
    devices = []
    for path in sorted(Path("/sys/class/hidraw").glob("hidraw*")):
        about = (path / "device" / "uevent").read_text() if (path / "device" / "uevent").exists() else ""
        vendor = next((line.split(":")[1] for line in about.splitlines() if line.startswith("HID_ID=")), "")
        if vendor.upper() in VENDORS and "space" in about.lower():
            devices.append(Path("/dev") / path.name)
    return devices

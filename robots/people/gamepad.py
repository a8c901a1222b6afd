"""A gamepad by the kernel's joystick interface (/dev/input/js*, Documentation/input/joydev/joystick-api.rst). Not yet tried on hardware.

Left stick: x and y. Right stick: z (up and down) and turning about z. Shoulder triggers turn about x. A: gripper. B: success. X: failure.
Y: resume. Start: pause. Select: acknowledge. The middle button: quit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from rlinf_vla.robot import ACKNOWLEDGE, FAILURE, PAUSE, QUIT, RESUME, SUCCESS, Person, RobotError

from .hands import Event, Hands, Source

EVENT = struct.Struct("=IhBB")
"""Milliseconds, value, type, number."""
BUTTON, AXIS, INITIAL = 0x01, 0x02, 0x80
FULL = 32767
GRIPPER = 0
WORDS = {1: SUCCESS, 2: FAILURE, 3: RESUME, 6: ACKNOWLEDGE, 7: PAUSE, 8: QUIT}
"""Button numbers of the xpad driver."""
AXES = {1: (0, -1.0), 0: (1, -1.0), 4: (2, -1.0), 3: (5, -1.0)}
"""Axis number -> (place in the motion, sign): pushing a stick away from oneself gives a negative value."""
TRIGGERS = {2: -1.0, 5: 1.0}
"""From -1 at rest to 1; they turn about x."""


class Gamepad:
    name = "gamepad"

    def __init__(self, path: Path) -> None:
        try:
            self._source = Source(path)
        except OSError as error:
            raise RobotError(f"gamepad {path}: {error.strerror}; is it plugged in, and are you in the group input?") from None
        self._motion = [0.0] * 6
        self._pressed = dict.fromkeys(TRIGGERS, 0.0)

    def events(self) -> Iterator[Event]:
        for data in self._source.reports(EVENT.size):
            if len(data) < EVENT.size:
                return
            if (event := self.parse(data)) is not None:
                yield event

    def parse(self, data: bytes) -> Event | None:
        """One event of the kernel's, 8 bytes; None where it says nothing to us."""
        _, value, kind, number = EVENT.unpack(data)
        if kind & INITIAL:
            return None  # how it lies there
        if kind == AXIS and number in AXES:
            place, sign = AXES[number]
            self._motion[place] = sign * max(-1.0, value / FULL)
        elif kind == AXIS and number in TRIGGERS:
            self._pressed[number] = TRIGGERS[number] * (max(-1.0, value / FULL) + 1) / 2
            self._motion[3] = sum(self._pressed.values())
        elif kind == BUTTON and value:
            return Event(toggles=True) if number == GRIPPER else Event(word=WORDS.get(number))
        else:
            return None
        return Event(motion=tuple(self._motion))

    def close(self) -> None:
        self._source.end()


def open_gamepad(device: str | None, dimensions: int) -> Person:
    found = [Path(device)] if device is not None else sorted(Path("/dev/input").glob("js*"))
    if not found:
        raise RobotError("session.person=gamepad: there is no /dev/input/js*: plug one in, or give session.device=PATH")
    return Hands(Gamepad(found[0]), dimensions)

"""Read a gamepad through the kernel's joystick interface (/dev/input/js*).

Documentation/input/joydev/joystick-api.rst describes the interface. Not yet tested on hardware.

Left stick: x and y. Right stick: z (up and down) and rotation about z. Shoulder triggers: rotation
about x. A: gripper. B: success. X: failure. Y: resume. Start: pause. Select: acknowledge.
Middle button: quit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from rlinf_vla.features.realworld.robot import (
    ACKNOWLEDGE,
    FAILURE,
    PAUSE,
    QUIT,
    RESUME,
    SUCCESS,
    Operator,
    RobotError,
)

from .device_reader import Device, DeviceReader, Event

EVENT = struct.Struct("=IhBB")
"""Kernel event: milliseconds, value, type, number."""
BUTTON, AXIS, INITIAL = 0x01, 0x02, 0x80
FULL = 32767
GRIPPER = 0
WORDS = {1: SUCCESS, 2: FAILURE, 3: RESUME, 6: ACKNOWLEDGE, 7: PAUSE, 8: QUIT}
"""Button number of the xpad driver -> word."""
AXES = {1: (0, -1.0), 0: (1, -1.0), 4: (2, -1.0), 3: (5, -1.0)}
"""Axis number -> (index in the motion, sign); pushing a stick away gives a negative value."""
TRIGGERS = {2: -1.0, 5: 1.0}
"""Axis number -> sign of the rotation about x; a trigger goes from -1 at rest to 1."""


class Gamepad(Device):
    """One joystick of the kernel."""

    name = "gamepad"
    refusal = "gamepad {path}: {error.strerror}; is it plugged in, and are you in the group input?"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._motion = [0.0] * 6
        self._pressed = dict.fromkeys(TRIGGERS, 0.0)

    def events(self) -> Iterator[Event]:
        for data in self.reports(EVENT.size):
            if len(data) < EVENT.size:
                return
            if (event := self.parse(data)) is not None:
                yield event

    def parse(self, data: bytes) -> Event | None:
        """Return the event of one kernel event (8 bytes), or None if it is irrelevant."""
        _, value, kind, number = EVENT.unpack(data)
        if kind & INITIAL:
            return None  # initial state of the device
        if kind == AXIS and number in AXES:
            axis, sign = AXES[number]
            self._motion[axis] = sign * max(-1.0, value / FULL)
        elif kind == AXIS and number in TRIGGERS:
            self._pressed[number] = TRIGGERS[number] * (max(-1.0, value / FULL) + 1) / 2
            self._motion[3] = sum(self._pressed.values())
        elif kind == BUTTON and value:
            return Event(toggles=True) if number == GRIPPER else Event(word=WORDS.get(number))
        else:
            return None
        return Event(motion=tuple(self._motion))


def open_gamepad(device: str | None, dimensions: int) -> Operator:
    paths = [Path(device)] if device is not None else sorted(Path("/dev/input").glob("js*"))
    if not paths:
        raise RobotError(
            "session.operator=gamepad: there is no /dev/input/js*: plug one in, or set session.device=PATH"
        )
    return DeviceReader(Gamepad(paths[0]), dimensions)

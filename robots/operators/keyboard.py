"""Read the terminal's keys without echo; Ctrl-C still works.

w s: forward, back. a d: left, right. r f: up, down. q e: rotate about z. Space: gripper.
y: success. n: failure. p: pause. Enter: resume. k: acknowledge. x: quit.
A key press moves for HOLD_S; the terminal repeats a held key. The arm then stands until TAKEOVER_S
after the last press, as the first repetition comes later than the next ones.
"""

from __future__ import annotations

import contextlib
import math
import termios
import time
import tty
from collections.abc import Iterator

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

from .device_reader import RELEASED, Device, DeviceReader, Event

TERMINAL = "/dev/tty"
HOLD_S = 0.25
"""How long a key press counts as held; longer than the terminal's key repeat interval."""
TAKEOVER_S = 0.7
"""How long it keeps the policy from acting; longer than the usual 0.5 s to the first repetition."""
STANDS = Event(motion=RELEASED.motion, keeps=True)
MOTIONS = {
    "w": (0, 1.0),
    "s": (0, -1.0),
    "a": (1, 1.0),
    "d": (1, -1.0),
    "r": (2, 1.0),
    "f": (2, -1.0),
    "q": (5, 1.0),
    "e": (5, -1.0),
}
"""Key -> (index in the motion, value)."""
WORDS = {
    "y": SUCCESS,
    "n": FAILURE,
    "p": PAUSE,
    "\n": RESUME,
    "\r": RESUME,
    "k": ACKNOWLEDGE,
    "x": QUIT,
}
GRIPPER = " "


class Keyboard(Device):
    """The keys of one terminal."""

    name = "keyboard"
    refusal = "session.operator=keyboard: {path} is not a terminal to read keys from ({error})"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        try:
            self._before = termios.tcgetattr(self.file)
            tty.setcbreak(self.file)
        except termios.error as error:
            super().close()
            self.release()
            raise RobotError(self.refusal.format(path=path, error=error)) from None

    def events(self) -> Iterator[Event]:
        moved = -math.inf
        for keys in self.reports(64, HOLD_S):
            if (quiet := time.monotonic() - moved) > HOLD_S:  # even if another key is held now
                yield STANDS if quiet <= TAKEOVER_S else RELEASED
            for key in keys.decode(errors="ignore"):
                if (event := parse(key)) is not None:
                    moved = time.monotonic() if event.motion is not None else moved
                    yield event

    def close(self) -> None:
        with contextlib.suppress(termios.error):  # the terminal may be closed
            if not self.released:
                termios.tcsetattr(self.file, termios.TCSADRAIN, self._before)
        super().close()


def parse(key: str) -> Event | None:
    """Return the event of a key, or None if the key is not bound."""
    if key in MOTIONS:
        axis, value = MOTIONS[key]
        return Event(motion=tuple(value if index == axis else 0.0 for index in range(6)))
    if key == GRIPPER:
        return Event(toggles=True)
    return Event(word=WORDS[key]) if key in WORDS else None


def open_keyboard(device: str | None, dimensions: int) -> Operator:
    return DeviceReader(Keyboard(device or TERMINAL), dimensions)

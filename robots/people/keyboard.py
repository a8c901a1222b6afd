"""The keys of the terminal, which stays usable: no echo, and Ctrl-C as ever.

w s: forward, back. a d: left, right. r f: up, down. q e: turn about z. Space: gripper. y: success. n: failure. p: pause. Enter: resume.
k: acknowledge. x: quit. A key counts for a moment; held, the terminal repeats it.
"""

from __future__ import annotations

import contextlib
import termios
import time
import tty
from collections.abc import Iterator

from rlinf_vla.robot import ACKNOWLEDGE, FAILURE, PAUSE, QUIT, RESUME, SUCCESS, Person, RobotError

from .hands import RELEASED, Event, Hands, Source

TERMINAL = "/dev/tty"
HOLD_S = 0.25
"""For which a key counts as held: longer than a terminal takes to repeat it."""
MOTIONS = {"w": (0, 1.0), "s": (0, -1.0), "a": (1, 1.0), "d": (1, -1.0), "r": (2, 1.0), "f": (2, -1.0), "q": (5, 1.0), "e": (5, -1.0)}
"""Key -> (place in the motion, value)."""
WORDS = {"y": SUCCESS, "n": FAILURE, "p": PAUSE, "\n": RESUME, "\r": RESUME, "k": ACKNOWLEDGE, "x": QUIT}
GRIPPER = " "


class Keyboard:
    name = "keyboard"

    def __init__(self, path: str) -> None:
        try:
            source = Source(path)
        except OSError as error:
            raise _no_terminal(path, error) from None
        try:
            self._before = termios.tcgetattr(source.file)
            tty.setcbreak(source.file)
        except termios.error as error:
            source.end()
            source.release()
            raise _no_terminal(path, error) from None
        self._source = source

    def events(self) -> Iterator[Event]:
        held = None
        for keys in self._source.reports(64, HOLD_S):
            if held is not None and time.monotonic() > held:  # also where another key is held now
                held = None
                yield RELEASED
            for key in keys.decode(errors="ignore"):
                if (event := parse(key)) is not None:
                    held = time.monotonic() + HOLD_S if event.motion is not None else held
                    yield event

    def close(self) -> None:
        with contextlib.suppress(termios.error):  # of a terminal that is gone
            if not self._source.released:
                termios.tcsetattr(self._source.file, termios.TCSADRAIN, self._before)
        self._source.end()


def _no_terminal(path: str, error: Exception) -> RobotError:
    return RobotError(f"session.person=keyboard: {path} is no terminal to read keys from ({error})")


def parse(key: str) -> Event | None:
    """None where it says nothing to us."""
    if key in MOTIONS:
        place, value = MOTIONS[key]
        return Event(motion=tuple(value if each == place else 0.0 for each in range(6)))
    if key == GRIPPER:
        return Event(toggles=True)
    return Event(word=WORDS[key]) if key in WORDS else None


def open_keyboard(device: str | None, dimensions: int) -> Person:
    return Hands(Keyboard(device or TERMINAL), dimensions)

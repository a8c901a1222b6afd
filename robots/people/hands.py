"""What all devices share: a thread waits for the device, and the control loop looks at what came last."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from rlinf_vla.robot import PAUSE, Action

STILL = 0.05
"""Of full deflection: what is less is no hand on the device."""
OPEN, CLOSED = 1.0, -1.0


class Source:
    """A device's file, which one thread reads until another ends that. Neither leaves a descriptor open."""

    def __init__(self, path: str | Path) -> None:
        """Raises OSError."""
        self.file = os.open(path, os.O_RDONLY)
        self.released = False
        self._ended, self._end = os.pipe()

    def reports(self, size: int, seconds: float | None = None) -> Iterator[bytes]:
        """What comes, at most ``size`` bytes at a time; nothing, ``b""``, where nothing came for ``seconds``. Ends where the device is gone
        or ``end`` was called."""
        try:
            while self._ended not in (ready := select.select([self.file, self._ended], [], [], seconds)[0]):
                try:
                    report = os.read(self.file, size) if ready else None
                except OSError:
                    return
                if report == b"":
                    return
                yield report or b""
        finally:
            self.release()

    def release(self) -> None:
        """By the reader, or by whoever finds that there will be none."""
        self.released = True
        os.close(self.file)
        os.close(self._ended)

    def end(self) -> None:
        """To be called once, also where nobody reads any more."""
        os.close(self._end)  # which the other end of the pipe sees


class Device(Protocol):
    name: str

    def events(self) -> Iterator[Event]:
        """As they come; ends where the device is gone, or was closed."""

    def close(self) -> None:
        """Ends ``events``. Is called once."""


class Event:
    """motion: dx, dy, dz, rx, ry, rz in [-1, 1], held until the next; None: as before. toggles: an open hand closes, a closed one opens.
    word: of WORDS."""

    def __init__(self, motion: tuple[float, ...] | None = None, toggles: bool = False, word: str | None = None) -> None:
        self.motion, self.toggles, self.word = motion, toggles, word


RELEASED = Event(motion=(0.0,) * 6)


class Hands:
    """Implements ``Person`` for one device. While she moves nothing the policy acts."""

    def __init__(self, device: Device, dimensions: int) -> None:
        """``dimensions``: 4 or 7, of actions."""
        self.name = device.name
        self._device, self._dimensions = device, dimensions
        self._lock = threading.Lock()
        self._motion: tuple[float, ...] = (0.0,) * 6
        self._toggled = False
        self._words: list[str] = []
        self._closed = self._lost = False
        self._listener = threading.Thread(target=self._listen, name=device.name, daemon=True)
        self._listener.start()

    def action(self, hand: float) -> Action | None:
        with self._lock:
            toggled, self._toggled = self._toggled, False
            if max(map(abs, self._motion)) < STILL and not toggled:
                return None
            if toggled:
                hand = CLOSED if hand > 0 else OPEN
            return np.clip(np.array([*self._motion[: self._dimensions - 1], hand], np.float32), -1, 1)

    def words(self) -> list[str]:
        with self._lock:
            said, self._words = self._words, []
            return [*said, PAUSE] if self._lost else said

    def close(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            self._device.close()
            self._listener.join(1.0)

    def hear(self, event: Event) -> None:
        with self._lock:
            if event.motion is not None:
                self._motion = event.motion
            self._toggled ^= event.toggles
            if event.word is not None:
                self._words.append(event.word)

    def _listen(self) -> None:
        why = ""
        try:
            for event in self._device.events():
                self.hear(event)
        except Exception as error:
            why = f" ({type(error).__name__}: {error})"
        self._let_go(why)

    def _let_go(self, why: str) -> None:
        """A device that is gone holds nothing, and pauses for good: the policy does not go on with nobody to stop it."""
        self.hear(RELEASED)
        self._lost = not self._closed
        if self._lost:
            self.name = f"{self._device.name}, which is gone"  # this is who paused
            with contextlib.suppress(OSError):  # the terminal may be what is gone
                print(f"the {self._device.name} is gone{why}: end the session, and begin it again with one", file=sys.stderr, flush=True)

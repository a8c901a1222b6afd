"""Read a teleoperation device in a thread and give the control loop its newest input."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlinf_vla.features.realworld.robot import PAUSE, Action, Operator, RobotError

STILL = 0.05
"""Dead zone, as a fraction of full deflection; below it the operator does not act."""
OPEN = 1.0
CLOSED = -1.0


@dataclass(frozen=True)
class Event:
    """Input of a device.

    motion: dx, dy, dz, rx, ry, rz in [-1, 1], held until the next motion; None keeps the last one.
    keeps: a motion of zeros keeps the arm standing, instead of returning control to the policy.
    toggles: an open gripper closes, a closed one opens. word: one of WORDS.
    """

    motion: tuple[float, ...] | None = None
    keeps: bool = False
    toggles: bool = False
    word: str | None = None


RELEASED = Event(motion=(0.0,) * 6)


class Device(ABC):
    """File of a device: one thread reads it until another calls ``close``. Leaks no descriptor."""

    name: str
    refusal: str
    """Error if the file at ``{path}`` cannot be opened because of ``{error}``."""

    def __init__(self, path: str | Path) -> None:
        """Open the file. Raises RobotError."""
        try:
            self.file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise RobotError(self.refusal.format(path=path, error=error)) from None
        self.released = False
        self._ended, self._end = os.pipe()

    def reports(self, size: int, seconds: float | None = None) -> Iterator[bytes]:
        """Yield reads of at most ``size`` bytes, and ``b""`` after ``seconds`` without data.

        Ends when the device is disconnected or ``close`` is called.
        """
        try:
            while self._ended not in (
                ready := select.select([self.file, self._ended], [], [], seconds)[0]
            ):
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
        """Close the file. Called by the reader, or by the opener if there will be no reader."""
        self.released = True
        os.close(self.file)
        os.close(self._ended)

    @abstractmethod
    def events(self) -> Iterator[Event]:
        """Yield events as they occur; end when the device is disconnected or closed."""

    def close(self) -> None:
        """End ``reports``. Call once, even if nothing reads any more."""
        os.close(self._end)  # the reader's ``select`` sees the other end of the pipe


class DeviceReader:
    """Implements ``Operator`` for one device. The policy acts while the device gives no motion."""

    def __init__(self, device: Device, dimensions: int, keys: Operator | None = None) -> None:
        """``dimensions``: of actions, 4 or 7. ``keys``: gives words, too, but does not act."""
        self.name = device.name
        self._device = device
        self._dimensions = dimensions
        self._keys = keys
        self._lock = threading.Lock()
        self._motion: tuple[float, ...] = (0.0,) * 6
        self._keeps = self._toggled = False
        self._words: list[str] = []
        self._closed = self._lost = False
        self._listener = threading.Thread(target=self._listen, name=device.name, daemon=True)
        self._listener.start()

    def action(self, hand: float) -> Action | None:
        with self._lock:
            toggled = self._toggled
            self._toggled = False
            if max(map(abs, self._motion)) < STILL and not (toggled or self._keeps):
                return None
            if toggled:
                hand = CLOSED if hand > 0 else OPEN
            return np.clip(
                np.array([*self._motion[: self._dimensions - 1], hand], np.float32), -1, 1
            )

    def words(self) -> list[str]:
        with self._lock:
            words = self._words
            self._words = []
            words += [PAUSE] if self._lost else []
        return words + (self._keys.words() if self._keys else [])

    def close(self) -> None:
        """Close the device and end its thread. Idempotent."""
        if not self._closed:
            self._closed = True
            self._device.close()
            self._listener.join(1.0)
            if self._keys:
                self._keys.close()

    def hear(self, event: Event) -> None:
        """Take in one event of the device."""
        with self._lock:
            if event.motion is not None:
                self._motion = event.motion
                self._keeps = event.keeps
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
        """Release the motion; pause for good if the device is lost: its operator cannot act."""
        self.hear(RELEASED)
        if not self._closed:
            self.name = f"{self._device.name}, disconnected"  # reported as the source of the pause, and so before it
            self._lost = True
            with contextlib.suppress(OSError):  # the terminal itself may be lost
                print(
                    f"the {self._device.name} is disconnected{why}: end the session and restart it with one",
                    file=sys.stderr,
                    flush=True,
                )

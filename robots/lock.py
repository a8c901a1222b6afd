"""Lock that one process holds while it drives an arm."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

from rlinf_vla.features.realworld.robot import RobotError

from .runtime_folder import LOCK, STATE, abstract_address, leads_to

_HOLDS, _DRIVES, _ENDS = " holds", " drives", " ends"


class Lock:
    """Lock that allows one process per arm; released when the process ends, however it ends.

    The file's lock also holds between machines with a common folder. The abstract address holds on
    this machine even if somebody deletes the file.

    killed: id of the previous process if it was killed while it drove the arm, else None; what is
    known if its lock has been deleted. socket: bound to the abstract address.
    """

    ENDING_S = 15.0
    """Longer than a process needs to stop the arm and to write what it knows, on a busy machine."""

    def __init__(self, folder: Path, name: str) -> None:
        """Take the lock; wait ENDING_S for a process that is ending.

        Raises RobotError if another process drives the arm ``name``.
        """
        self._path = folder / LOCK
        self._text = ""
        existed = self._path.exists()
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        self._address = abstract_address(folder)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        until = time.monotonic() + self.ENDING_S
        while not self._taken():
            holder, state = self._read()
            if state not in (_ENDS, "") or time.monotonic() > until:
                os.close(self._file)
                self.socket.close()
                advice = "end that session first (`rlinf-vla robot stop` stops the arm)"
                raise RobotError(
                    f"{name} is driven by process {holder or 'unknown'} already: {advice}"
                )
            time.sleep(0.05)
        holder, state = self._read()
        self.killed = holder if state not in (_HOLDS, "") else None
        if (
            not existed and not holder and os.path.lexists(folder / STATE)
        ):  # which a process removes when it ends
            self.killed = "with a deleted lock"
        if self.killed is None:
            self.hold()

    def _taken(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        try:
            self.socket.bind(self._address)
        except OSError:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            return False
        return True

    @property
    def intact(self) -> bool:
        """Whether the file at the lock's path is still the one that is locked."""
        return leads_to(self._path, self._file)

    def restore(self) -> None:
        """Lock the file that is at the path now. Raises OSError, also if another process has it."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        before = self._file
        self._file = descriptor
        os.close(before)
        self._write(self._text)

    def hold(self) -> None:
        """Record this process as the holder; a killed predecessor must be latched by now."""
        self._write(f"{os.getpid()}{_HOLDS}")

    def drive(self) -> None:
        """Record that the arm may move from now on."""
        self._write(f"{os.getpid()}{_DRIVES}")

    def end(self) -> None:
        """Record that this process stops the arm and ends."""
        self._write(f"{os.getpid()}{_ENDS}")

    def release(self) -> None:
        """Record that the arm stands and that any fault is latched on disk."""
        self._write("")

    def _read(self) -> tuple[str, str]:
        """Return the id of the last process, and what it did; empty after ``release``."""
        holder, space, state = os.pread(self._file, 64, 0).decode(errors="replace").partition(" ")
        return holder, space + state

    def _write(self, text: str) -> None:
        self._text = text
        os.truncate(self._file, 0)
        os.pwrite(self._file, text.encode(), 0)

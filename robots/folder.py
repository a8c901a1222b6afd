"""Where the processes around one arm meet: a folder of this user and machine with the arm's lock, latched fault, journal and sockets."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

from rlinf_vla import places
from rlinf_vla.robot import RobotError

from .disk import Disk, at_once

ORDERS = "arm.socket"
STATE = "arm.state"
JOURNAL = "journal.jsonl"
_LOCK, _LATCH = "lock", "latched.json"
_DRIVES = " drives"
_LONGEST_SOCKET = 107
"""Bytes of a path; the system's limit."""


def root() -> Path:
    """The parent of all arms' folders, readable to this user only; it outlives logins, and another machine with the same home has another.
    Raises RobotError where there can be none, or others can open it."""
    try:
        path = places.state() / "arms" / _plain(socket.gethostname())
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except (OSError, RuntimeError) as error:
        raise RobotError(f"no folder for locks and faults of arms: {error}; XDG_STATE_HOME=FOLDER names another place") from None
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RobotError(f"{path} is open to other users: `chmod 700` it, or remove it where it is not yours")
    return path


def of_arm(name: str) -> Path:
    """Raises RobotError, also where its path leaves no room for that of a socket in it."""
    path = root() / _plain(name)
    if (length := len(os.fsencode(path / ORDERS))) > _LONGEST_SOCKET:
        much = f"{length - _LONGEST_SOCKET} bytes too long for a socket"
        raise RobotError(f"{path / ORDERS}: {much}; XDG_STATE_HOME=FOLDER names a shorter place")
    path.mkdir(exist_ok=True)
    return path


def address(host: str) -> str:
    """One arm is one folder, by whichever of its names: its IPv4 address, or ``host`` where that leads to none."""
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):
        return host


def arms() -> list[Path]:
    """Of all arms that this user's processes have ever driven from this machine."""
    return sorted(path for path in root().iterdir() if path.is_dir())


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)


class Lock:
    """One process per arm. Given up when the process ends, however it ends. ``killed``: the number of the one before, if that drove the arm
    until it was killed."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises RobotError where another process drives the arm ``name``."""
        self._file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = self._read()[0] or "unknown"
            os.close(self._file)
            raise RobotError(
                f"{name} is driven by process {holder} already: end that session first (`rlinf-vla robot stop` makes the arm stand still)"
            ) from None
        holder, drove = self._read()
        self.killed = holder if drove else None
        if not drove:
            self.hold()

    def hold(self) -> None:
        """That the process before was killed is latched, where it was."""
        self._write(str(os.getpid()))

    def drive(self) -> None:
        """From now on the arm moves."""
        self._write(f"{os.getpid()}{_DRIVES}")

    def release(self) -> None:
        """It stands, and what is to be latched is."""
        self._write("")

    def _read(self) -> tuple[str, bool]:
        text = os.pread(self._file, 64, 0).decode()
        return text.removesuffix(_DRIVES), text.endswith(_DRIVES)

    def _write(self, text: str) -> None:
        os.truncate(self._file, 0)
        os.pwrite(self._file, text.encode(), 0)


class Latch:
    """A fault that only a person may clear, kept on disk: a process that is started again finds it."""

    def __init__(self, folder: Path, disk: Disk = at_once) -> None:
        self._path, self._disk = folder / _LATCH, disk

    def read(self) -> str | None:
        try:
            return str(json.loads(self._path.read_text())["fault"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError):
            return f"{self._path} cannot be read"

    def write(self, fault: str) -> None:
        text = json.dumps({"fault": fault, "time": time.time()})
        self._disk(lambda: _write_durably(self._path, text))

    def clear(self) -> None:
        self._disk(lambda: self._path.unlink(missing_ok=True))


def _write_durably(path: Path, text: str) -> None:
    aside = path.with_suffix(".new")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)


class Journal:
    """What happened to the arm, one JSON object a line, only ever appended to."""

    def __init__(self, path: Path, disk: Disk = at_once) -> None:
        self._file, self._disk = path.open("a", buffering=1 << 16), disk
        self._flushed = time.monotonic()

    def write(self, event: str, *, durable: bool = False, **values: Any) -> None:
        """``durable``: on the disk when that has done it."""
        line = json.dumps({"wall_time": time.time(), "time": time.monotonic(), "event": event, **values}) + "\n"

        def put() -> None:
            self._file.write(line)
            if durable:
                self._file.flush()
                os.fsync(self._file.fileno())

        self._disk(put)

    def flush(self) -> None:
        """To the system, about once a second."""
        if time.monotonic() - self._flushed > 1.0:
            self._disk(self._file.flush)
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._disk(self._file.close)

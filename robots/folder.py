"""Where the processes around one arm meet: a folder of this user and machine with the arm's lock, latched fault, journal and sockets."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from rlinf_vla.robot import RobotError

from .disk import Disk, at_once

ORDERS = "arm.socket"
STATE = "arm.state"
JOURNAL = "journal.jsonl"
_LOCK, _LATCH = "lock", "latched.json"
_DRIVES = " drives"


def root() -> Path:
    """The parent of all arms' folders, readable to this user only. Raises RobotError where another owns it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(runtime) / "rlinf-vla" if runtime else Path(f"/tmp/rlinf-vla-{os.getuid()}")  # noqa: S108  (owner and mode are checked)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RobotError(f"{path} is open to other users: remove it")
    return path


def of_arm(name: str) -> Path:
    path = root() / re.sub(r"[^\w.-]", "_", name)
    path.mkdir(exist_ok=True)
    return path


def arms() -> list[Path]:
    """Of all arms that this user's processes have driven since the machine was started."""
    return sorted(path for path in root().iterdir() if path.is_dir())


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

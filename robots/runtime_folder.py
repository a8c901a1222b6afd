"""Folder of one arm and user: lock, latched faults, journal and sockets."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import printable
from rlinf_vla.core import user_dirs
from rlinf_vla.core.io import write_text
from rlinf_vla.core.robot import RobotError

Work = Callable[[], object]
Disk = Callable[[Work], None]
"""Runs the work now or soon."""


def at_once(work: Work) -> None:
    work()


class BackgroundWriter:
    """Implements ``Disk`` with a thread."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """The last write error, or None."""
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="disk", daemon=True).start()

    def __call__(self, work: Work) -> None:
        self._work.put(work)

    def settle(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for all work so far; return whether every write succeeded."""
        done = threading.Event()
        self(done.set)
        return done.wait(seconds) and self.problem is None

    def close(self) -> None:
        """End the thread after all work so far. No work may be added afterwards."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except OSError as error:
                self.problem = f"disk: {error.strerror or error}; faults and the journal cannot be written"


ORDERS = "arm.socket"
STATE = "arm.state"
JOURNAL = "journal.jsonl"
LOCK = "lock"
_LATCH = "latched.json"
_HOLDS, _DRIVES, _ENDS = " holds", " drives", " ends"
_LONGEST_SOCKET = 107
"""The system's limit on the path of a socket, bytes."""


def root() -> Path:
    """Return the parent folder of all arms, private to this user, which persists across logins.

    Raises RobotError if it cannot be created, or if others can open it.
    """
    try:
        path = user_dirs.state() / "robots"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except (OSError, RuntimeError) as error:
        raise RobotError(f"no folder for locks and faults of arms: {error}; XDG_STATE_HOME=FOLDER names another place") from None
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RobotError(f"{path} is open to other users: `chmod 700` it, or remove it where it is not yours")
    return path


def of_arm(name: str) -> Path:
    """Return the folder of one arm, the same on each machine that shares the home directory.

    Raises RobotError, also if a socket path in it is too long.
    """
    path = root() / _plain(name)
    if (length := len(os.fsencode(path / ORDERS))) > _LONGEST_SOCKET:
        much = f"{length - _LONGEST_SOCKET} bytes too long for a socket"
        raise RobotError(f"{path / ORDERS}: {much}; XDG_STATE_HOME=FOLDER names a shorter place")
    path.mkdir(exist_ok=True)
    return path


def address(host: str) -> str:
    """Return the IPv4 address of ``host``, or ``host`` if it does not resolve.

    It gives one arm the same folder under each of its names.
    """
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):
        return host


def arms() -> list[Path]:
    """Return the folders of all arms that this user has ever driven."""
    return sorted(path for path in root().iterdir() if path.is_dir())


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)


class Lock:
    """Lock that allows one process per arm; released when the process ends, however it ends.

    ``killed``: id of the previous process if it was killed while it drove the arm, else None.
    """

    ENDING_S = 15.0
    """Longer than a process needs to stop the arm and to write what it knows, on a busy machine."""

    def __init__(self, folder: Path, name: str) -> None:
        """Take the lock; wait ENDING_S for a process that is ending.

        Raises RobotError if another process drives the arm ``name``.
        """
        self._file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        until = time.monotonic() + self.ENDING_S
        while not self._taken():
            holder, state = self._read()
            if state not in (_ENDS, "") or time.monotonic() > until:
                os.close(self._file)
                advice = "end that session first (`rlinf-vla robot stop` stops the arm)"
                raise RobotError(f"{name} is driven by process {holder or 'unknown'} already: {advice}")
            time.sleep(0.05)
        holder, state = self._read()
        self.killed = holder if state in (_DRIVES, _ENDS) else None
        if self.killed is None:
            self.hold()

    def _taken(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

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
        holder, space, state = os.pread(self._file, 64, 0).decode().partition(" ")
        return holder, space + state

    def _write(self, text: str) -> None:
        os.truncate(self._file, 0)
        os.pwrite(self._file, text.encode(), 0)


class Latch:
    """Faults that only an operator may clear, kept on disk so that a restarted process finds them.

    Any text can be a fault: it becomes one line of printable characters, at most LONGEST.
    """

    LONGEST = 500
    MOST = 20
    """More faults are not added: the first ones keep the arm latched."""

    def __init__(self, folder: Path, disk: Disk = at_once) -> None:
        """Read the faults on disk. A file that cannot be read is a fault, too."""
        self._path, self._disk = folder / _LATCH, disk
        try:
            found = json.loads(self._path.read_text())["faults"]
            self._faults = [_line(fault) for fault in list[str](found)[: self.MOST]]
        except FileNotFoundError:
            self._faults = []
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            self._faults = [_line(f"{self._path} cannot be read")]

    @property
    def fault(self) -> str | None:
        """The oldest fault; None if the arm may move."""
        return self._faults[0] if self._faults else None

    @property
    def faults(self) -> tuple[str, ...]:
        """All of them, oldest first; each is acknowledged on its own."""
        return tuple(self._faults)

    def add(self, fault: str, recovering: bool = False) -> bool:
        """Latch the fault unless it is latched; return whether it was added.

        recovering: the oldest fault was acknowledged already, so the same one counts again.
        """
        fault = _line(fault)
        if fault in self._faults[recovering:] or len(self._faults) >= self.MOST:
            return False
        self._faults.append(fault)
        self._write()
        return True

    def release(self) -> None:
        """Remove the oldest fault."""
        del self._faults[:1]
        self._write()

    def _write(self) -> None:
        if not self._faults:
            self._disk(lambda: self._path.unlink(missing_ok=True))
            return
        text = json.dumps({"faults": self._faults, "time": time.time()})
        self._disk(lambda: write_text(self._path, text))


def _line(text: str) -> str:
    return " ".join(printable(text).split())[: Latch.LONGEST] or "a fault without a name"


class Journal:
    """Append-only log of the arm's events, one JSON object per line."""

    def __init__(self, path: Path, disk: Disk = at_once) -> None:
        self._file, self._disk = path.open("a", buffering=1 << 16), disk
        self._flushed = time.monotonic()

    def write(self, event: str, *, durable: bool = False, **values: Any) -> None:
        """Append one event. ``durable``: flush and fsync it."""
        line = json.dumps({"wall_time": time.time(), "time": time.monotonic(), "event": event, **values}) + "\n"

        def put() -> None:
            self._file.write(line)
            if durable:
                self._file.flush()
                os.fsync(self._file.fileno())

        self._disk(put)

    def flush(self) -> None:
        """Flush to the system about once a second."""
        if time.monotonic() - self._flushed > 1.0:
            self._disk(self._file.flush)
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._disk(self._file.close)

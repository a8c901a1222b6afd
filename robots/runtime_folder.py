"""Folder of one arm and user: latched faults, journal and sockets; ``lock.py`` has its lock."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from rlinf_vla.config.errors import printable
from rlinf_vla.core import user_dirs
from rlinf_vla.core.io import write_text
from rlinf_vla.features.realworld.robot import RobotError

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
                self.problem = (
                    f"disk: {error.strerror or error}; faults and the journal cannot be written"
                )


ORDERS = "arm.socket"
STATE = "arm.state"
JOURNAL = "journal.jsonl"
LOCK = "lock"
LATCH = "latched.json"
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
        raise RobotError(
            f"no folder for locks and faults of arms: {error}; XDG_STATE_HOME=FOLDER names another place"
        ) from None
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RobotError(
            f"{path} is open to other users: `chmod 700` it, or remove it where it is not yours"
        )
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


def abstract_address(folder: Path) -> str:
    """Return where the process that drives the arm of ``folder`` takes orders beside ``ORDERS``.

    The system gives it to one process, until that ends, and nobody can delete it.
    """
    return abstract_addresses() + _digest(os.path.realpath(folder))


def abstract_addresses() -> str:
    """Return how the abstract addresses (``unix(7)``) of all arms of this user begin.

    As the folders, they depend on XDG_STATE_HOME.
    """
    try:
        state = str(user_dirs.state())
    except RuntimeError:  # no home: only folders that are given can be used
        state = ""
    return f"\0rlinf-vla-arm-{os.getuid()}-{_digest(state)}-"


def _digest(path: str) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:24]


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


class Latch:
    """Faults that only an operator may clear, kept on disk so that a restarted process finds them.

    Any text can be a fault: it becomes one line of printable characters, at most LONGEST.
    """

    LONGEST = 500
    MOST = 20
    """More faults are not added: the first ones keep the arm latched."""

    def __init__(self, folder: Path, disk: Disk = at_once) -> None:
        """Read the faults on disk. A file that cannot be read is a fault, too."""
        self._path = folder / LATCH
        self._disk = disk
        self._written = False
        """Whether there should be a file."""
        try:
            faults = json.loads(self._path.read_text())["faults"]
            self._faults = [_line(fault) for fault in list[str](faults)[: self.MOST]]
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

    @property
    def intact(self) -> bool:
        """Whether the faults that were written are still there."""
        return not self._written or os.path.lexists(self._path)

    def restore(self) -> None:
        """Write the faults again."""
        self._write()

    def _write(self) -> None:
        text = json.dumps({"faults": self._faults, "time": time.time()}) if self._faults else None

        def put() -> None:
            self._written = text is not None
            if text is None:
                self._path.unlink(missing_ok=True)
            else:
                write_text(self._path, text)

        self._disk(put)


def _line(text: str) -> str:
    return " ".join(printable(text).split())[: Latch.LONGEST] or "a fault without a name"


def leads_to(path: Path, file: int) -> bool:
    """Return whether the open ``file`` is the one at ``path``."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except OSError:
        return False


class Journal:
    """Append-only log of the arm's events, one JSON object per line."""

    def __init__(self, path: Path, disk: Disk = at_once) -> None:
        self._path = path
        self._disk = disk
        self._file = self._opened()
        self._flushed = time.monotonic()

    def write(self, event: str, *, durable: bool = False, **values: Any) -> None:
        """Append one event. ``durable``: flush and fsync it."""
        line = (
            json.dumps(
                {"wall_time": time.time(), "time": time.monotonic(), "event": event, **values}
            )
            + "\n"
        )

        def put() -> None:
            if durable:
                self._renew()
            self._file.write(line)
            if durable:
                self._file.flush()
                os.fsync(self._file.fileno())

        self._disk(put)

    def flush(self) -> None:
        """Flush to the system about once a second; begin a new file if this one was removed."""
        if time.monotonic() - self._flushed > 1.0:
            self._disk(self._flush)
            self._flushed = time.monotonic()

    def _opened(self) -> TextIO:
        return self._path.open("a", buffering=1 << 16)

    def _flush(self) -> None:
        self._file.flush()
        self._renew()

    def _renew(self) -> None:
        if not leads_to(self._path, self._file.fileno()):
            with contextlib.suppress(FileNotFoundError):  # until its folder is there again
                before = self._file
                self._file = self._opened()
                before.close()

    def close(self) -> None:
        self._disk(lambda: self._file.close())

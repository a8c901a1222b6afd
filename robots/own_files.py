"""Notice that files of an arm's process were deleted or replaced, and restore them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from .runtime_folder import Disk

LOOK_S = 0.2
"""Period of the checks."""


class OwnFile(Protocol):
    @property
    def intact(self) -> bool:
        """Whether the file is there, and is still the one of this process. Never raises."""

    def restore(self) -> None:
        """Put it there again. Raises OSError."""


class OwnFiles:
    """The files through which other processes find, stop and see an arm, and learn its faults.

    A person or a cleaner of temporary files may delete them, or their folder, while the arm moves.
    """

    def __init__(self, folder: Path, files: Mapping[str, OwnFile], disk: Disk) -> None:
        """``disk``: checks and restores, because a file system on a network may block."""
        self._folder = folder
        self._files = files
        self._disk = disk
        self._asked = -LOOK_S
        self._checking = False
        self._fault: str | None = None

    def look(self, now: float) -> str | None:
        """Return a fault that names what was missing, or None. Called at each tick; no blocking."""
        if not self._checking and now - self._asked >= LOOK_S:
            self._asked = now
            self._checking = True
            self._disk(self._check)
        fault = self._fault
        self._fault = None
        return fault

    def _check(self) -> None:
        try:
            if lost := [name for name, file in self._files.items() if not file.intact]:
                what = f"files: {', '.join(lost)} in {self._folder} {'was' if len(lost) == 1 else 'were'} deleted or replaced"
                self._fault = what  # the arm stops before they are restored
                self._restore(lost, what)
        finally:
            self._checking = False

    def _restore(self, lost: list[str], what: str) -> None:
        try:
            self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(exist_ok=True)
            for name in lost:
                self._files[name].restore()
        except OSError as error:
            self._fault = f"{what} and cannot be restored: {error.strerror or error}: make room for them there"

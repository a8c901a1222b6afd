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
        """``disk``: runs the checks, because a file system on a network may block."""
        self._folder, self._files, self._disk = folder, files, disk
        self._asked = -LOOK_S
        self._waits = False
        self._lost: list[str] | None = None
        """What the last check missed; None while it runs, and after it was reported."""

    def look(self, now: float) -> str | None:
        """Restore what is missing; return a fault that names it, or None. Called at each tick."""
        if not self._waits and now - self._asked >= LOOK_S:
            self._asked, self._waits = now, True
            self._disk(self._check)
        if (lost := self._lost) is None:
            return None
        self._lost, self._waits = None, False
        return self._restored(lost) if lost else None

    def _check(self) -> None:
        self._lost = [name for name, file in self._files.items() if not file.intact]

    def _restored(self, lost: list[str]) -> str:
        what = f"files: {', '.join(lost)} in {self._folder} {'was' if len(lost) == 1 else 'were'} deleted or replaced"
        try:
            self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(exist_ok=True)
            for name in lost:
                self._files[name].restore()
        except OSError as error:
            return f"{what} and cannot be restored: {error.strerror or error}: make room for them there"
        return f"{what}; they are restored"

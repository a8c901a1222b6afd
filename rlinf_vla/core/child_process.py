"""Start Python child processes safely, and count lost ones. Uses only the standard library.

``python -m`` and ``python -c`` put the current directory first on the import path: ``json.py``
there would replace the standard library's. A child process must therefore not import from there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ATTEMPTS = 3
"""Give up when this many processes in a row are lost at the same work without progress."""

SAFE = {"PYTHONSAFEPATH": "1"}
"""Environment variables of children, inherited by theirs: Python 3.11 and newer then leave the
current directory off the import path."""

_WITHOUT_CURRENT_DIRECTORY = "import sys\nsys.path[:] = [entry for entry in sys.path if entry]\n"
"""The same for ``python -c`` before 3.11; a file cannot replace ``sys``, which is built in."""


def command(program: Sequence[str], python: str | None = None) -> list[str]:
    """Return the command line for ``program``: ``-m MODULE ...``, ``-c CODE ...`` or ``FILE ...``.

    ``python``: interpreter of another environment, maybe older than 3.11; None: this one's. Raises
    ValueError for ``-m`` with another interpreter, which may import from the current directory.
    """
    first, *rest = program
    if python is None:
        return [sys.executable, "-P", *program]
    if first == "-m":
        raise ValueError(f"{program}: in another Python environment run a file")
    if first == "-c":
        return [python, first, _WITHOUT_CURRENT_DIRECTORY + rest[0], *rest[1:]]
    return [python, *program]


def environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a child's environment variables: those of this process, SAFE and ``added``."""
    return {**os.environ, **SAFE, **(added or {})}


@dataclass
class Losses:
    """Count consecutive processes that were lost at the same work without progress."""

    in_a_row: int = 0
    """Losses since the last one that got further than all before."""
    _furthest: float = 0.0

    def give_up(self, reached: float) -> bool:
        """Count one more loss, which had reached ``reached``; return whether to give up."""
        if not self.in_a_row or reached > self._furthest:
            self.in_a_row, self._furthest = 0, reached
        self.in_a_row += 1
        return self.in_a_row >= ATTEMPTS

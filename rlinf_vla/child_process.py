"""How a Python process of ours is started, and how often one may be lost. Standard library only.

Python puts the current directory on the path of what ``python -m`` and ``python -c`` import, and before the installed packages: a file
``json.py`` that lies there would run in place of the standard library's. A child must therefore not look there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ATTEMPTS = 3
"""So many processes may be lost in a row at the same work, none of which got further than those before."""

SAFE = {"PYTHONSAFEPATH": "1"}
"""For a child's environment, which its own children inherit: Python 3.11 and newer then leave the current directory out."""

_WITHOUT_CURRENT_DIRECTORY = "import sys\nsys.path[:] = [entry for entry in sys.path if entry]\n"
"""The same for ``python -c`` of an older Python; ``sys`` is built in and cannot be replaced by a file."""


def command(program: Sequence[str], python: str | None = None) -> list[str]:
    """The command line that runs ``program`` (``-m MODULE ...``, ``-c CODE ...`` or ``FILE ...``).

    python: the program of another Python environment, which may be older than 3.11; None takes this one's. There ``-m`` may find modules in
    the current directory, and is refused: run a file. Raises ValueError.
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
    """A child's environment variables: this process's, and ``added``."""
    return {**os.environ, **SAFE, **(added or {})}


@dataclass
class Losses:
    """Processes that were lost at one piece of work, which each of them began anew."""

    in_a_row: int = 0
    """Of which none got further than those before."""
    _furthest: float = 0.0

    def give_up(self, reached: float) -> bool:
        """One more is lost, which had got so far. Whether another attempt is not worth it."""
        if not self.in_a_row or reached > self._furthest:
            self.in_a_row, self._furthest = 0, reached
        self.in_a_row += 1
        return self.in_a_row >= ATTEMPTS

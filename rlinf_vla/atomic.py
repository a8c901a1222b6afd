"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write; ``path`` becomes that afterwards, and is on the disk then. One writer at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}")
    if aside.is_symlink():  # not to be followed: the directory may be somebody else's
        aside.unlink()
    try:
        yield aside
        fsync(aside)
        aside.replace(path)
        fsync(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def fsync(path: Path) -> None:
    """A file, or the names in a directory, outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, document: dict[str, Any]) -> None:
    with replacing(path) as aside:
        aside.write_text(json.dumps(document, indent=1) + "\n")

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
    try:
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_json(path: Path, document: dict[str, Any]) -> None:
    with replacing(path) as aside:
        aside.write_text(json.dumps(document, indent=1) + "\n")

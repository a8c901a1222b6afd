"""Print a table that fits the terminal, or one JSON document for other programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from rlinf_vla.config.errors import printable

JSON = "--json"
"""The option that asks for JSON instead of tables."""
UNFOLDED = 10_000
"""Width of a console that folds no cell, in columns."""


def print_table(
    columns: Sequence[str | Column], rows: Iterable[Sequence[object]], title: str | None = None
) -> None:
    """Print a table; cells are folded only to fit a terminal, never in a pipe or a file."""
    heads = [
        column if isinstance(column, Column) else Column(column, overflow="fold")
        for column in columns
    ]
    table = Table(*heads, title=title, title_justify="left", show_edge=False)
    for row in rows:
        table.add_row(*(printable(str(cell)) for cell in row))
    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    Console(highlight=False, markup=False, width=UNFOLDED if wide else None).print(table)


def print_json(document: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(document, indent=1, ensure_ascii=False))

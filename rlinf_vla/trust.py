"""What a file that somebody else made must not decide (docs/trust.md). Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

OUTSIDE = {"outside": True}
"""Metadata of a configuration's field that names a program, something to import, a place to write or a machine: where a recipe comes from
a file, the person at the command line says it."""


def outside(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Key, value, and whether it is the default, of each field marked OUTSIDE in a dataclass and in those that it contains."""
    for field in fields(config):
        key, value = prefix + field.name, getattr(config, field.name)
        if field.metadata.get("outside"):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            yield key, value, value == default
        elif is_dataclass(value):
            yield from outside(value, f"{key}.")


def printable(text: str) -> str:
    """Lines as a terminal shows them: a character that would steer it, or hide others, becomes its escape sequence."""
    return "".join(each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode() for each in text)

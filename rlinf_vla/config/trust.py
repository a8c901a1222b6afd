"""Mark configuration fields that an untrusted file must not set (docs/trust.md).

Uses only the standard library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

OUTSIDE = {"outside": True}
"""Metadata of a configuration field that names a program, an import, an output path or a machine;
if a recipe comes from a file, the user must give such a field on the command line."""


def outside(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Yield key, value, and whether it is the default, of each OUTSIDE field, nested ones too."""
    for field in fields(config):
        key, value = prefix + field.name, getattr(config, field.name)
        if field.metadata.get("outside"):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            yield key, value, value == default
        elif is_dataclass(value):
            yield from outside(value, f"{key}.")


def printable(text: str) -> str:
    """Escape characters that could control a terminal or hide text; keep newlines and tabs."""
    return "".join(each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode() for each in text)

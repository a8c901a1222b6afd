"""Exceptions that end a command with one line: a user's mistake, or a failure."""

from __future__ import annotations


class UserError(Exception):
    """A user's mistake, in one line: what is wrong, where, and the fix. The CLI exits with 2."""


class Failure(RuntimeError):
    """An operation failed on every retry; the first line names it. The CLI exits with 1."""


def printable(text: str) -> str:
    """Escape characters that could control a terminal or hide text; keep newlines and tabs."""
    return "".join(
        character
        if character.isprintable() or character in "\n\t"
        else character.encode("unicode_escape").decode()
        for character in text
    )

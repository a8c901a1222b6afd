"""Exceptions that end a command with one line: a user's mistake, or a failure."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """A user's mistake, in one line: what is wrong, where, and the fix. The CLI exits with 2."""


class Failure(RuntimeError):
    """An operation failed on every retry; the first line names it. The CLI exits with 1."""


def require_one_of(key: str, value: str, known: Sequence[str]) -> None:
    """Raise UserError unless ``value``, set by the recipe's ``key``, is one of ``known``."""
    if value not in known:
        raise UserError(f"{key}={value} is not known: use one of {', '.join(known)}")

"""Exceptions that end a command with one line: a user's mistake, or a failure."""

from __future__ import annotations


class UserError(Exception):
    """A user's mistake, in one line: what is wrong, where, and the fix. The CLI exits with 2."""


class Failure(RuntimeError):
    """An operation failed on every retry; the first line names it. The CLI exits with 1."""

"""Write files and directories atomically and durably; read files that anybody may have written.

It also names what a run has after a number of iterations: :func:`step_name`.

Imports the standard library only, but for :func:`read_yaml`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import UserError

STEP_PREFIX = "step_"
STEP_NAME = rf"{STEP_PREFIX}[0-9]+"
"""Pattern of the names of what a run has after a number of iterations: checkpoints, evaluations,
videos."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which then replaces ``path`` atomically and is synced to disk.

    After an exception ``path`` is unchanged. Only one writer at a time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}")
    if aside.is_symlink():  # must not be followed: the directory may be untrusted
        aside.unlink()
    try:
        yield aside
        fsync(aside)
        aside.replace(path)
        fsync(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


@contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """Yield a new directory, which then replaces ``path`` and is synced to disk.

    After an exception ``path`` is unchanged.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        for child in (*aside.rglob("*"), aside):
            fsync(child)
        shutil.rmtree(path, ignore_errors=True)
        aside.rename(path)
        fsync(path.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def fsync(path: Path) -> None:
    """Sync a file, or the entries of a directory, to disk so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str, errors: str = "strict") -> None:
    """Write ``text`` atomically as UTF-8; ``errors`` as in ``str.encode``."""
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8", errors=errors)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write ``document`` atomically as JSON."""
    write_text(path, json.dumps(document, indent=1) + "\n")


def read_json(path: Path, most: int = 256 << 20) -> Any:
    """Return the JSON value of a file, which may be untrusted. Raises OSError, or ValueError if it
    is no file, has more than ``most`` bytes, or is damaged or nested too deep."""
    return parse_json(_read_text(path, most))


def read_json_lines(path: Path, most: int = 256 << 20) -> list[Any]:
    """Return the JSON value of each line that is not blank. Raises as :func:`read_json`."""
    values = []
    for number, line in enumerate(_read_text(path, most).split("\n"), 1):
        if line.strip():
            try:
                values.append(parse_json(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
    return values


def read_document(path: Path, wanted: str) -> Any:
    """``read_json`` of a given file. Raises UserError; ``wanted``: what to give."""
    try:
        return read_json(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {wanted}") from None
    except ValueError:
        raise UserError(f"{path} is damaged (no JSON): take another copy of it") from None


def read_yaml(path: Path, most: int = 1 << 18, deepest: int = 32) -> Any:
    """Return the values of a saved recipe, which may be untrusted, with interpolations as they are.

    Raises OSError, or ValueError in one line, also for an alias: a few bytes of aliases stand for
    billions of values, and no recipe that was saved here has one.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    text = _read_text(path, most)
    depth = 0
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(
                    f"line {event.start_mark.line + 1} has the alias *{event.anchor}, which no saved recipe has"
                )
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                event, yaml.CollectionEndEvent
            )
            if depth > deepest:
                raise ValueError(
                    f"line {event.start_mark.line + 1} is nested more than {deepest} deep"
                )
        return OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (
        yaml.YAMLError,
        OmegaConfBaseException,
        RecursionError,
        AttributeError,
        TypeError,
        AssertionError,
    ) as error:
        raise ValueError(" ".join(str(error).split())[:200] or "it is damaged") from None


def _read_text(path: Path, most: int) -> str:
    if path.exists() and not path.is_file():  # a pipe, whose reading may never end
        raise ValueError("it is no file")
    if path.stat().st_size > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return path.read_text(encoding="utf-8")


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text says. Raises ValueError, also for one that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(directory: Path) -> str:
    """Return the SHA-256 over names and contents of all files below a directory, in name order.

    Raises UserError if there is no such directory.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory")
    total = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        total.update(f"{path.relative_to(directory).as_posix()}\0{digest(path)}\n".encode())
    return total.hexdigest()


def step_name(iterations: int) -> str:
    """Return the name of what a run has after a number of iterations."""
    return f"{STEP_PREFIX}{iterations:06d}"


def step_of(name: str) -> int | None:
    """Return the number of iterations in a name, or None if it is another name."""
    return int(name.removeprefix(STEP_PREFIX)) if re.fullmatch(STEP_NAME, name) else None

"""A command that sends a signal at its second iteration: from outside, a busy machine may let it end before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = """
import json, os, signal, sys

write, waits = sys.stdout.write, ["iteration 2/"]


def kill_rank(placement, number):
    with open(placement) as file:
        workers = json.load(file)["workers"]
    (pid,) = [each["pid"] for each in workers if (each["role"], each["number"]) == ("trainer", number)]
    os.kill(pid, signal.SIGKILL)


def sending(text):
    if waits and waits[0] in text:
        waits.clear()
        {statement}
    return write(text)


sys.stdout.write = sending
"""
STOP_ITSELF = "os.kill(os.getpid(), signal.SIGSTOP)"


def kill_rank(run_dir: Path, number: int) -> str:
    """The statement that kills a trainer rank of the run."""
    return f"kill_rank({str(run_dir / 'placement.json')!r}, {number})"


@contextmanager
def at_the_second_iteration(package: Path, statement: str) -> Iterator[None]:
    """The command of the context executes it when it says the iteration; ``package`` is on its PYTHONPATH."""
    program = package / "sitecustomize.py"
    program.write_text(PROGRAM.format(statement=statement))
    try:
        yield
    finally:
        program.unlink()

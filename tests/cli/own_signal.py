"""A command that sends a signal when it prints a text: from outside, a busy machine may let it end before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = """
import json, os, signal, sys

write, waits = sys.stdout.write, [{text!r}]


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
KILL_ITSELF = "os.kill(os.getpid(), signal.SIGKILL)"
SECOND_ITERATION = "iteration 2/"


def kill_rank(run_dir: Path, number: int) -> str:
    """The statement that kills a trainer rank of the run."""
    return f"kill_rank({str(run_dir / 'placement.json')!r}, {number})"


@contextmanager
def when_it_prints(text: str, package: Path, statement: str) -> Iterator[None]:
    """The command of the context executes the statement before it prints the text; ``package`` is on its PYTHONPATH."""
    program = package / "sitecustomize.py"
    program.write_text(PROGRAM.format(text=text, statement=statement))
    try:
        yield
    finally:
        program.unlink()

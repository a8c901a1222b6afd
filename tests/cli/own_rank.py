"""A command that kills one of its own trainer ranks: from outside, a busy machine may let it end before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KILLS_A_RANK = """
import json, os, signal, sys

write, waits = sys.stdout.write, ["iteration 2/"]


def killing(text):
    if waits and waits[0] in text:
        waits.clear()
        with open({placement!r}) as file:
            workers = json.load(file)["workers"]
        (pid,) = [each["pid"] for each in workers if (each["role"], each["number"]) == ("trainer", {rank})]
        os.kill(pid, signal.SIGKILL)
    return write(text)


sys.stdout.write = killing
"""


@contextmanager
def killing_rank(package: Path, run_dir: Path, rank: int) -> Iterator[None]:
    """The command of the context kills the rank when it says the second iteration; ``package`` is on its PYTHONPATH."""
    program = package / "sitecustomize.py"
    program.write_text(KILLS_A_RANK.format(placement=str(run_dir / "placement.json"), rank=rank))
    try:
        yield
    finally:
        program.unlink()

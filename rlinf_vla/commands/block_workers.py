"""Processes that play a sweep's blocks, several at once. One that dies or hangs is replaced, and its block played again.

A worker is ``python -m rlinf_vla.commands.block_workers RUN_DIR``: it reads the recipe there, takes jobs from its standard input and
answers on its standard output, one JSON object per line; results are files in the run directory, written whole or not at all.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO

from rlinf_vla import child_process
from rlinf_vla.evaluation.blocks import Block, Job
from rlinf_vla.types import UserError

ATTEMPTS = 3
"""So many workers may be lost in a row, with no block completed, before the sweep gives up."""


class BlockWorkers:
    """A context manager; the workers end with it. ``losses``: workers that were replaced so far."""

    def __init__(self, directory: Path, count: int, timeout: float) -> None:
        """``timeout``: seconds that one block may take, a worker's start included, before its worker counts as hung."""
        self.losses = 0
        self._directory, self._count, self._timeout = directory, count, timeout
        self._workers: list[_Worker] = []

    def __enter__(self) -> BlockWorkers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self._workers:
            worker.end()
        self._workers = []

    def run(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """The jobs as they are finished. Raises UserError where one says so, and RuntimeError with its reason where one fails."""
        waiting, lost_in_a_row = deque(jobs), 0
        while len(self._workers) < min(self._count, len(jobs)):
            self._workers.append(_Worker(self._directory))
        while waiting or any(worker.job for worker in self._workers):
            for worker in self._workers:
                if worker.job is None and waiting:
                    worker.give(waiting.popleft(), self._timeout)
            for worker in self._heard():
                answer, job = worker.answer(), worker.job
                if answer is None:
                    self.losses, lost_in_a_row = self.losses + 1, lost_in_a_row + 1
                    if lost_in_a_row == ATTEMPTS:
                        raise RuntimeError(
                            f"{ATTEMPTS} processes in a row died or hung while playing blocks; the last said: {worker.last_words()}"
                        )
                    self._replace(worker, waiting)
                elif "mistake" in answer:
                    raise UserError(answer["mistake"])
                elif "error" in answer:
                    raise RuntimeError(answer["error"])
                elif job is not None:
                    worker.job, lost_in_a_row = None, 0
                    yield job

    def _heard(self) -> list[_Worker]:
        """Those that have answered, died or been silent for too long."""
        busy = [worker for worker in self._workers if worker.job is not None]
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            found = selector.select(max(0.0, min(worker.deadline for worker in busy) - time.monotonic()))
        return [key.data for key, _ in found] or [worker for worker in busy if worker.deadline <= time.monotonic()]

    def _replace(self, worker: _Worker, waiting: deque[Job]) -> None:
        if worker.job is not None:
            waiting.appendleft(worker.job)
        worker.end()
        self._workers[self._workers.index(worker)] = _Worker(self._directory)


class _Worker:
    def __init__(self, directory: Path) -> None:
        self.job: Job | None = None
        self.deadline = float("inf")
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (nameless, and open as long as the process)
        self._process = subprocess.Popen(
            child_process.command(["-m", "rlinf_vla.commands.block_workers", str(directory)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=child_process.environment(),
            start_new_session=True,  # Ctrl-C reaches the parent only
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self.output = self._process.stdin, self._process.stdout

    def give(self, job: Job, timeout: float) -> None:
        self.job, self.deadline = job, time.monotonic() + timeout
        try:
            self._input.write(json.dumps(asdict(job)).encode() + b"\n")
            self._input.flush()
        except BrokenPipeError:
            pass  # it has died; its answer, which is none, says so

    def answer(self) -> dict[str, str] | None:
        """None: it has died, or says nothing any more."""
        if self.deadline <= time.monotonic():
            return None
        line = self.output.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def last_words(self) -> str:
        return last_line(self._said) or "nothing"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._input.close()
        self.output.close()
        self._said.close()


def last_line(said: IO[bytes]) -> str:
    """The last that a process printed, read in place because it shares the file's position; empty where it printed nothing."""
    size = os.fstat(said.fileno()).st_size
    lines = os.pread(said.fileno(), 4096, max(0, size - 4096)).decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def main(directory: Path) -> None:
    """The worker's side."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    from rlinf_vla import recipe as recipes
    from rlinf_vla.commands.block_player import BlockPlayer, contest, parts_of
    from rlinf_vla.recipe.kept import read_kept

    with ExitStack() as stack:
        try:
            recipe = recipes.read(read_kept(directory))
            player = BlockPlayer(recipe, contest(recipe), parts_of(recipe))
            stack.callback(player.close)
            for line in iter(sys.stdin.readline, ""):
                said = json.loads(line)
                block = Block(**{**said["block"], "seeds": tuple(said["block"]["seeds"])})
                player.keep(Job(block, said["filmed"]), directory)
                print(json.dumps({"done": block.name}), file=answers, flush=True)
        except UserError as error:
            print(json.dumps({"mistake": str(error)}), file=answers, flush=True)
        except Exception as error:
            traceback.print_exc()
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)


def _leave_with_parent() -> None:
    """End this process as soon as nobody holds the other end of its standard input."""
    watch = select.poll()
    watch.register(0, select.POLLHUP)
    watch.poll()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

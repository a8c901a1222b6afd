"""Processes that play a sweep's blocks, several at once. One that dies or hangs is replaced, and its block played again from its beginning.

A worker is ``python -m rlinf_vla.commands.block_workers RUN_DIR``: it reads the recipe there, takes jobs from its standard input and
answers on its standard output, one JSON object per line (``reached``: which part of the block it has played; ``done``, ``mistake``,
``error``); results are files in the run directory, written whole or not at all.
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
from typing import IO, Any

from rlinf_vla import child_process
from rlinf_vla.child_process import ATTEMPTS, Losses
from rlinf_vla.evaluation.blocks import Block, Job
from rlinf_vla.types import Failure, UserError


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
        """The jobs as they are finished. Raises UserError where one says so, RuntimeError with its reason where one fails, and Failure
        where workers are lost at one again and again, none of which plays more of its episodes than those before."""
        waiting, losses = deque(jobs), {job: Losses() for job in jobs}
        while len(self._workers) < min(self._count, len(jobs)):
            self._workers.append(_Worker(self._directory))
        while waiting or any(worker.job for worker in self._workers):
            for worker in self._workers:
                if worker.job is None and waiting:
                    worker.give(waiting.popleft(), self._timeout)
            for worker in self._heard():
                job, answers = worker.job, worker.answers()
                assert job is not None
                for answer in answers:
                    if "mistake" in answer:
                        raise UserError(answer["mistake"])
                    if "error" in answer:
                        raise RuntimeError(answer["error"])
                    if "reached" in answer:
                        worker.reached = answer["reached"]
                    else:
                        worker.job = None
                        yield job
                if worker.job is not None and (worker.gone or worker.deadline <= time.monotonic()):
                    self.losses += 1
                    if losses[job].give_up(worker.reached):
                        words = worker.last_words()
                        raise Failure(
                            f"{ATTEMPTS} processes in a row died or hung while playing block {job.block.name}, with nothing gained; "
                            f"the last said: {words}"
                        )
                    self._replace(worker, waiting)

    def _heard(self) -> list[_Worker]:
        """Those that have answered, died or been silent for too long."""
        busy = [worker for worker in self._workers if worker.job is not None]
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            found = selector.select(max(0.0, min(worker.deadline for worker in busy) - time.monotonic()))
        heard = [key.data for key, _ in found]
        return [worker for worker in busy if worker in heard or worker.deadline <= time.monotonic()]

    def _replace(self, worker: _Worker, waiting: deque[Job]) -> None:
        if worker.job is not None:
            waiting.appendleft(worker.job)
        worker.end()
        self._workers[self._workers.index(worker)] = _Worker(self._directory)


class _Worker:
    def __init__(self, directory: Path) -> None:
        self.job: Job | None = None
        self.reached = 0.0
        """The part of its job's episodes that it has played."""
        self.deadline, self.gone, self._buffer = float("inf"), False, b""
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
        os.set_blocking(self.output.fileno(), False)

    def give(self, job: Job, timeout: float) -> None:
        self.job, self.reached, self.deadline = job, 0.0, time.monotonic() + timeout
        try:
            self._input.write(json.dumps(asdict(job)).encode() + b"\n")
            self._input.flush()
        except BrokenPipeError:
            pass  # it has died; the end of its output says so

    def answers(self) -> list[dict[str, Any]]:
        """What it has said since; afterwards ``gone`` says whether it has died."""
        try:
            data = os.read(self.output.fileno(), 1 << 16)
        except BlockingIOError:
            return []
        self.gone = not data
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

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

    def answer(**said: object) -> None:
        print(json.dumps(said), file=answers, flush=True)

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
                player.keep(Job(block, said["filmed"]), directory, lambda fraction: answer(reached=fraction))
                answer(done=block.name)
        except UserError as error:
            answer(mistake=str(error))
        except Exception as error:
            traceback.print_exc()
            answer(error=f"{type(error).__name__}: {error}")


def _leave_with_parent() -> None:
    """End this process as soon as nobody holds the other end of its standard input."""
    watch = select.poll()
    watch.register(0, select.POLLHUP)
    watch.poll()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Run a sweep's blocks in several processes at once.

A worker that dies or hangs is replaced, and its block starts again. A worker is ``python -m
rlinf_vla.evaluation.block_workers RUN_DIR``. It reads the recipe there, takes jobs from standard
input and answers on standard output, one JSON object per line (``reached``: completed fraction of
the block; ``done``, ``mistake``, ``error``). Results are files in the run directory, written whole.
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

from rlinf_vla.config.errors import Failure, UserError
from rlinf_vla.core import child_process
from rlinf_vla.core.child_process import ATTEMPTS, Losses
from rlinf_vla.evaluation.blocks import Block, Job, Sweep


class BlockWorkers:
    """Context manager that owns the worker processes. ``losses``: workers replaced so far."""

    def __init__(self, directory: Path, count: int, timeout: float) -> None:
        """``timeout``: seconds for one block and a worker's start, until it counts as hung."""
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
        """Yield jobs in the order in which they finish.

        Raises UserError or RuntimeError if a worker reports one. Raises Failure if ``ATTEMPTS``
        workers in a row are lost at the same job without further progress.
        """
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
                            f"{ATTEMPTS} processes in a row died or hung while playing block {job.block.name}, without progress; "
                            f"last output: {words}"
                        )
                    self._replace(worker, waiting)

    def _heard(self) -> list[_Worker]:
        """Wait and return the workers that have answered, died or passed their deadline."""
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
        """Fraction of its job's episodes that are done."""
        self.deadline, self.gone, self._buffer = float("inf"), False, b""
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (nameless, and open as long as the process)
        self._process = subprocess.Popen(
            child_process.command(["-m", "rlinf_vla.evaluation.block_workers", str(directory)]),
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
            pass  # it has died: its output ends

    def answers(self) -> list[dict[str, Any]]:
        """Return new messages from the worker; sets ``gone`` if it has died."""
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
    """Return the last line that a process printed, or an empty string.

    Reads with ``pread``, because the process shares the file's position.
    """
    size = os.fstat(said.fileno()).st_size
    lines = os.pread(said.fileno(), 4096, max(0, size - 4096)).decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def main(directory: Path) -> None:
    """Run a worker process: execute jobs from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")

    def answer(**said: object) -> None:
        print(json.dumps(said), file=answers, flush=True)

    os.dup2(2, 1)  # output of libraries goes to stderr
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    from rlinf_vla.evaluation.block_player import BlockPlayer
    from rlinf_vla.runtime import recipes
    from rlinf_vla.runtime.saved_recipe import read_saved

    with ExitStack() as stack:
        try:
            player = BlockPlayer(Sweep.of(recipes.read(read_saved(directory))))
            stack.callback(player.close)
            for line in iter(sys.stdin.readline, ""):
                said = json.loads(line)
                block = Block(**{**said["block"], "seeds": tuple(said["block"]["seeds"])})
                player.carry_out(Job(block, said["filmed"]), directory, lambda fraction: answer(reached=fraction))
                answer(done=block.name)
        except UserError as error:
            answer(mistake=str(error))
        except Exception as error:
            traceback.print_exc()
            answer(error=f"{type(error).__name__}: {error}")


def _leave_with_parent() -> None:
    """End this process as soon as the other end of its standard input is closed."""
    watch = select.poll()
    watch.register(0, select.POLLHUP)
    watch.poll()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

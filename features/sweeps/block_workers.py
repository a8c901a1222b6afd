"""Run a sweep's blocks in several processes at once.

A worker that dies or hangs is replaced, and its block starts again. A worker is ``python -m
rlinf_vla.features.sweeps.block_workers RUN_DIR``. It reads the recipe there, and answers each job
with messages (``reached``: completed fraction of the block; ``done``, ``mistake``, ``error``).
Results are files in the run directory, written whole.
"""

from __future__ import annotations

import selectors
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import Failure, UserError
from rlinf_vla.core.channel import Channel, ChannelClosed
from rlinf_vla.core.child_process import ATTEMPTS, Child, Losses
from rlinf_vla.features.sweeps.blocks import Block, Job, Sweep


class BlockWorkers:
    """Play blocks in worker processes. ``losses``: workers replaced so far."""

    def __init__(self, count: int, timeout: float) -> None:
        """``timeout``: seconds for one block and a worker's start, until it counts as hung."""
        self.losses = 0
        self._count = count
        self._timeout = timeout
        self._workers: list[_Worker] = []

    def close(self) -> None:
        for worker in self._workers:
            worker.child.end()
        self._workers = []

    def run(
        self, jobs: Sequence[Job], directory: Path, reached: Callable[[Job, float], None]
    ) -> None:
        """Write the results of jobs into the sweep's directory; ``reached(job, 1)`` as each ends.

        Raises UserError or RuntimeError if a worker reports one. Raises Failure if ``ATTEMPTS``
        workers in a row are lost at the same job without further progress.
        """
        waiting = deque(jobs)
        losses = {job: Losses() for job in jobs}
        while len(self._workers) < min(self._count, len(jobs)):
            self._workers.append(_Worker(directory))
        while waiting or any(worker.job for worker in self._workers):
            for worker in self._workers:
                if worker.job is None and waiting:
                    worker.give(waiting.popleft(), self._timeout)
            for worker in self._heard():
                job = worker.job
                assert job is not None
                for answer in worker.answers():
                    if "mistake" in answer:
                        raise UserError(answer["mistake"])
                    if "failure" in answer:
                        raise Failure(answer["failure"])
                    if "error" in answer:
                        raise RuntimeError(answer["error"])
                    if "reached" in answer:
                        worker.reached = answer["reached"]
                    else:
                        worker.job = None
                        reached(job, 1.0)
                if worker.job and (worker.gone or not worker.child.remaining):
                    self.losses += 1
                    if losses[job].give_up(worker.reached):
                        raise Failure(
                            f"{ATTEMPTS} processes in a row died or hung while playing block {job.block.name}, without progress; "
                            f"last output: {worker.child.output_tail() or 'nothing'}"
                        )
                    waiting.appendleft(job)
                    worker.child.end()
                    self._workers[self._workers.index(worker)] = _Worker(directory)

    def _heard(self) -> list[_Worker]:
        """Wait and return the workers that have answered, died or passed their deadline."""
        busy = [worker for worker in self._workers if worker.job is not None]
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.child.channel, selectors.EVENT_READ, worker)
            ready = selector.select(min(worker.child.remaining for worker in busy))
        heard = [key.data for key, _ in ready]
        return [worker for worker in busy if worker in heard or not worker.child.remaining]


class _Worker:
    def __init__(self, directory: Path) -> None:
        self.job: Job | None = None
        self.reached = 0.0
        """Fraction of its job's episodes that are done."""
        self.gone = False
        self.child = Child(["-m", "rlinf_vla.features.sweeps.block_workers", str(directory)])

    def give(self, job: Job, timeout: float) -> None:
        self.job = job
        self.reached = 0.0
        self.child.allow(timeout)
        with suppress(ChannelClosed, BlockingIOError):  # ``answers`` notices
            self.child.channel.send(asdict(job), timeout)

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yield new messages from the worker; sets ``gone`` if it has died."""
        try:
            while (answer := self.child.channel.receive(0)) is not None:
                yield answer
        except ChannelClosed:
            self.gone = True


def main(directory: Path) -> None:
    """Run a worker process: execute jobs until the parent process ends."""
    parent = Channel.to_parent()
    parent.exit_with_peer()

    def answer(**message: object) -> None:
        parent.send(message, None)

    from rlinf_vla.features.sweeps.block_player import BlockPlayer
    from rlinf_vla.runtime import recipes
    from rlinf_vla.runtime.saved_recipe import read_saved

    with ExitStack() as stack:
        try:
            player = BlockPlayer(Sweep.of(recipes.read(read_saved(directory))))
            stack.callback(player.close)
            while True:
                message = parent.wait()
                block = Block(**{**message["block"], "seeds": tuple(message["block"]["seeds"])})
                player.run(
                    [Job(block, message["filmed"])],
                    directory,
                    lambda job, fraction: answer(reached=fraction),
                )
                answer(done=block.name)
        except UserError as error:
            answer(mistake=str(error))
        except Failure as error:
            answer(failure=str(error))
        except Exception as error:
            traceback.print_exc()
            answer(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

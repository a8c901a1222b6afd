"""Work in a separate process that may be killed: a fork, because starting Python and importing torch takes seconds."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120


def forked(work: Callable[..., object], *arguments: Any) -> Any:
    """A process that is started.

    It never collects garbage of this one: destructors of process groups and of video files wait for threads that it lacks.
    """
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    gc.freeze()
    try:
        process.start()
    finally:
        gc.unfreeze()
    return process


def in_process(work: Callable[[], object]) -> int:
    """The exit code: 1 where ``work`` raised, -9 where it was killed."""
    process = forked(work)
    process.join(TIMEOUT_S)
    assert process.exitcode is not None, "it did not end"
    return process.exitcode


@contextmanager
def during(hold: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """``hold(wait)`` runs in another process and waits while the body runs."""
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()

    def wait() -> None:
        ready.set()
        done.wait(TIMEOUT_S)

    process = forked(hold, wait)
    try:
        assert ready.wait(TIMEOUT_S)
        yield
    finally:
        done.set()
        process.join(TIMEOUT_S)
    assert process.exitcode == 0


def on_ranks(work: Callable[[int], Any], folder: Path, count: int = 2) -> list[Any]:
    """Results of ``work(rank)`` on each of ``count`` ranks connected by gloo: tensors and numbers, in lists and dicts.

    If one fails, the others, which wait for it, are killed.
    """
    for module in (
        "torch._dynamo",
        "torch.distributed.fsdp",
    ):  # here, because in each process it would take seconds
        import_module(module)

    results = Path(mkdtemp(dir=folder))

    def run(rank: int) -> None:
        faulthandler.enable(2)  # pytest's own writes where a worker of xdist shows nothing
        torch.set_num_threads(1)
        limit = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{results}/meeting",
            rank=rank,
            world_size=count,
            timeout=limit,
        )
        torch.save(work(rank), results / str(rank))
        dist.destroy_process_group()

    processes = [forked(run, rank) for rank in range(count)]
    deadline = time.monotonic() + TIMEOUT_S
    waiting = {process.sentinel: process for process in processes}
    while waiting and (ready := wait(list(waiting), deadline - time.monotonic())):
        ended = [waiting.pop(sentinel) for sentinel in ready]
        for process in ended:
            process.join()
        if any(process.exitcode for process in ended):
            break
    exits = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    assert exits == [0] * count, f"exit codes of the ranks (None: it did not end): {exits}"
    return [torch.load(results / str(rank), weights_only=True) for rank in range(count)]

"""Work in a process of its own that may be killed: a fork, because starting Python and importing torch takes seconds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TIMEOUT_S = 120


def in_process(work: Callable[[], None]) -> int:
    """The exit code: 1 where ``work`` raised, -9 where it was killed."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(TIMEOUT_S)
    assert process.exitcode is not None, "it did not end"
    return process.exitcode


@contextmanager
def during(hold: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """``hold(wait)`` runs in another process, and is waiting while the body runs."""
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()

    def wait() -> None:
        ready.set()
        done.wait(TIMEOUT_S)

    process = context.Process(target=hold, args=(wait,))
    process.start()
    try:
        assert ready.wait(TIMEOUT_S)
        yield
    finally:
        done.set()
        process.join(TIMEOUT_S)
    assert process.exitcode == 0

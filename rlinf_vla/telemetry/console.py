"""Show a job's progress: a live progress bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from rlinf_vla.config.errors import printable
from rlinf_vla.core.interrupt import discard, leave_closed_terminal

PLAIN_STEPS = 10
"""Number of lines that replace the progress bar of a stage where there is no terminal."""
WIDE, NARROW = 120, 80
"""Columns of a terminal below which the bar is short, and below which there is none."""


class TrainingConsole:
    """Progress of a training run, with the time left estimated from the latest ten iterations.

    A context manager, so that the cursor is restored however the run ends.
    """

    def __init__(
        self, total_iterations: int, seconds: float = math.inf, brief: bool = False
    ) -> None:
        """``seconds``: time budget of the run, after which no further iteration begins.

        ``brief``: iterations are single optimiser steps, so ten lines report on them in a log
        file, and as many on a stage.
        """
        self._total = total_iterations
        self._limit = seconds
        self._spent = 0.0
        self._brief = brief
        self._tenths = dict[str, int]()
        self._every = max(1, total_iterations // PLAIN_STEPS) if brief else 1
        self._seconds: deque[float] = deque(maxlen=10)
        self._live = _live_progress()
        if self._live is not None:
            self._task = self._live.add_task("train", total=total_iterations, status="", stage="")

    def __enter__(self) -> TrainingConsole:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Report that ``iteration`` iterations are done, with the ``metrics`` of the latest one."""
        status = _status(metrics)
        if "timing_s/iteration" in metrics:
            self._seconds.append(metrics["timing_s/iteration"])
            self._spent += self._seconds[-1]
        if iteration < self._total and self._seconds:
            left = sum(self._seconds) / len(self._seconds) * (self._total - iteration)
            # early in the line, whose end a narrow terminal cuts off
            status.insert(1, f"{duration(min(left, max(0.0, self._limit - self._spent)))} left")
        if self._live is None:
            if iteration % self._every == 0 or iteration == self._total:
                say("  ".join([f"iteration {iteration}/{self._total}", *status]))
        else:
            self._live.update(self._task, completed=iteration, status=" · ".join(status), stage="")

    def resume(self, iteration: int) -> None:
        """Start the bar at ``iteration``, the iterations done before this process started."""
        if self._live is not None:
            self._live.update(self._task, completed=iteration)

    def stage(self, name: str, fraction: float) -> None:
        """Show that ``fraction`` in [0, 1] of the stage ``name`` is done."""
        if self._live is not None:
            self._live.update(self._task, stage=f"{name} {fraction:.0%}")
        elif self._brief:
            say_tenths(self._tenths, name, fraction)

    def say(self, text: str) -> None:
        """Print a permanent line above the bar."""
        if self._live is None:
            say(text)
        else:
            self._live.console.print(printable(text), markup=False, highlight=False)


@contextmanager
def stages() -> Iterator[Callable[[str, float], None]]:
    """Show one bar per stage of a job. Yields ``report(stage, fraction)``, ``fraction`` in [0, 1].

    Without a terminal, print a line at every tenth of a stage.
    """
    live = _live_progress()
    tasks: dict[str, TaskID] = {}
    tenths: dict[str, int] = {}

    def report(stage: str, fraction: float) -> None:
        if live is not None:
            if stage not in tasks:
                tasks[stage] = live.add_task(stage, total=100, status="", stage="")
            live.update(tasks[stage], completed=100 * fraction)
        else:
            say_tenths(tenths, stage, fraction)

    with live or nullcontext():
        yield report


def say_tenths(said: dict[str, int], stage: str, fraction: float) -> None:
    """Print a line at every tenth of ``stage``; ``said``: the last tenth of each stage."""
    if int(fraction * PLAIN_STEPS) > said.get(stage, 0):
        said[stage] = int(fraction * PLAIN_STEPS)
        say(f"{stage} {fraction:.0%}")


def say(text: str) -> None:
    """Print a plain line; discard all later output if stdout can no longer be written."""
    print(printable(text), file=cast(TextIO, JobOutput(sys.stdout)), flush=True)


class JobOutput:
    """Output of a job: all further output is discarded once it can no longer be written.

    The job must go on to its checkpoint although Ctrl-C also ended ``| tee log``, the terminal was
    closed, or the disk of the log file is full.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO = getattr(
            stream, "rich_proxied_file", stream
        )  # below another live line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        self._attempt(partial(self._stream.write, text))

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError:
            leave_closed_terminal()
            discard(self._stream.fileno())  # also silences later prints of other modules


def duration(seconds: float) -> str:
    """Format seconds as ``40 s``, ``12 min`` or ``3 h 05 min``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def _live_progress() -> Progress | None:
    """Return a progress bar, or None where stdout is not a terminal that can redraw a line."""
    console = Console(file=cast(TextIO, JobOutput(sys.stdout)))
    if not sys.stdout.isatty() or console.is_dumb_terminal:
        return None
    return progress_on(console)


def progress_on(console: Console) -> Progress:
    """Return a progress display with one line per task; the end of its status is cut off to fit."""
    narrow = console.width < WIDE
    return Progress(
        TextColumn(
            "{task.description}",
            style="bold",
            table_column=Column(no_wrap=True, overflow="ellipsis", max_width=console.width // 2),
        ),
        *([] if console.width < NARROW else [BarColumn(bar_width=10 if narrow else 24)]),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[stage]}", markup=False, style="dim"),
        TextColumn(
            "{task.fields[status]}",
            markup=False,
            style="cyan",
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        ),
        console=console,
        expand=True,
    )


def _status(metrics: Mapping[str, float]) -> list[str]:
    parts = []
    if "rollout/success_once" in metrics:
        parts.append(f"success {100 * metrics['rollout/success_once']:.1f} %")
    if "rollout/reward_mean" in metrics:
        parts.append(f"reward {metrics['rollout/reward_mean']:.3g}")
    if "sft/loss" in metrics and "rollout/steps" not in metrics:
        parts.append(f"loss {metrics['sft/loss']:.3g}")
    if "throughput/steps_per_s" in metrics:
        parts.append(f"{metrics['throughput/steps_per_s']:,.0f} steps/s")
    return parts

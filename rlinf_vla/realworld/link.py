"""Connect the learner to the robot process: the link's interface, and pipes on one machine."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rlinf_vla.core import child_process
from rlinf_vla.evaluation.block_workers import last_line
from rlinf_vla.realworld.episode import Job
from rlinf_vla.realworld.process import FAREWELL, FAREWELL_S

START_S = 180.0
"""Time limit until the first answer: imports, building the policy, connecting."""


class RobotLink(Protocol):
    """Link to one robot process."""

    def give(self, job: Job) -> None:
        """Queue the job. A job whose episode the robot process still has is answered at once."""

    def publish(self, weights: Path) -> None:
        """Make new weights, in the learner's run directory, available to jobs given from now on."""

    def answers(self, seconds: float) -> list[dict[str, Any]]:
        """Wait up to ``seconds`` for an answer; return all new ones (see ``process``).

        The episodes that they report are in the run directory.
        """

    def lost(self) -> str | None:
        """Return why the process will answer no more, None while it is alive."""

    def end(self) -> None:
        """Stop the arm and let the process write its data and end; kill it if it does not."""


class LocalRobotLink:
    """Implement ``RobotLink`` by pipes, on the learner's machine and run directory."""

    def __init__(self, directory: Path, silence_s: float, lock: int | None = None) -> None:
        """``silence_s``: without an answer for this long the process counts as hung. ``lock``: file
        descriptor that the process keeps open, in a separate session, even if it outlives us."""
        self._silence = silence_s
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (unnamed, open as long as the process)
        self._process = subprocess.Popen(
            # without a lock it stays in our process group: it may read keys, and ignores Ctrl-C
            child_process.command(["-m", "rlinf_vla.realworld.process", str(directory)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=child_process.environment(),
            start_new_session=lock is not None,
            pass_fds=() if lock is None else (lock,),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._heard, self._begun, self._buffer, self._over = time.monotonic(), False, b"", False

    def give(self, job: Job) -> None:
        try:
            self._input.write(json.dumps(asdict(job)).encode() + b"\n")
            self._input.flush()
        except (BrokenPipeError, ValueError):  # the second: after hang_up
            self._over = True

    def publish(self, weights: Path) -> None:
        """Do nothing: the process reads the weights in the run directory."""

    def answers(self, seconds: float) -> list[dict[str, Any]]:
        """Wait up to ``seconds`` for an answer; return all new ones."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            if not selector.select(seconds):
                return []
        data = os.read(self._output.fileno(), 1 << 16)
        self._over |= not data
        self._heard, self._begun = time.monotonic(), True
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def lost(self) -> str | None:
        if self._over:
            self._process.wait(FAREWELL_S)
            return f"the robot process died (exit code {self._process.returncode}): {self._last_words()}"
        if time.monotonic() - self._heard > (self._silence if self._begun else START_S):
            return f"the robot process sent nothing for {time.monotonic() - self._heard:.0f} s: {self._last_words()}"
        return None

    def _last_words(self) -> str:
        return last_line(self._said) or "it printed nothing"

    def hang_up(self) -> None:
        """Close the process's input: it stops the arm, latches this, saves its data and ends."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._input.write(FAREWELL.encode())
        self.hang_up()
        try:
            self._process.wait(FAREWELL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()
        self._said.close()

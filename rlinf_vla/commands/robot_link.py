"""From the learner to the process beside a robot: what such a link does, and the one by pipes, on one machine."""

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

from rlinf_vla import child_process
from rlinf_vla.commands.block_workers import last_line
from rlinf_vla.commands.robot_process import FAREWELL, FAREWELL_S
from rlinf_vla.rollout.robot_episode import Job

START_S = 180.0
"""In which a process imports, builds the policy and connects without a word."""


class Link(Protocol):
    """To one process beside the robot, for as long as both live."""

    def give(self, job: Job) -> None:
        """Played after those given before; one whose episode the robot's side still has is answered at once."""

    def publish(self, weights: Path) -> None:
        """The learner's newest, in its run directory: for the jobs that are given from now on, at the latest."""

    def answers(self, seconds: float) -> list[dict[str, Any]]:
        """What it said meanwhile (``robot_process``); as soon as it says something. Episodes that were played are in the run directory."""

    def lost(self) -> str | None:
        """Why nothing more is to be expected of it."""

    def end(self) -> None:
        """The arm stands, what was seen is written, the process ends; else it is killed."""


class Process:
    """Implements ``Link``: run directory and machine are the learner's own."""

    def __init__(self, directory: Path, silence_s: float, lock: int | None = None) -> None:
        """``silence_s``: without a word, after which it counts as hung. ``lock``: a descriptor that is open for as long as the process
        lives, also where it outlives us: it is then in a session of its own."""
        self._silence = silence_s
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (nameless, and open as long as the process)
        self._process = subprocess.Popen(
            # else in our process group: it may read the terminal's keys, and leaves Ctrl-C to us
            child_process.command(["-m", "rlinf_vla.commands.robot_process", str(directory)]),
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
        """It reads them there."""

    def answers(self, seconds: float) -> list[dict[str, Any]]:
        """What it said meanwhile; as soon as it says something."""
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
            return f"the process beside the robot died (exit code {self._process.returncode}): {self._last_words()}"
        if time.monotonic() - self._heard > (self._silence if self._begun else START_S):
            return f"the process beside the robot said nothing for {time.monotonic() - self._heard:.0f} s: {self._last_words()}"
        return None

    def _last_words(self) -> str:
        return last_line(self._said) or "nothing was printed"

    def hang_up(self) -> None:
        """Its input ends: it makes the arm stand, which is latched, writes what it has seen, and ends."""
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

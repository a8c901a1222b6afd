"""The learner's view of the process beside a robot: jobs go there, episodes come back as files; one that dies or hangs is replaced."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from rlinf_vla.commands.block_workers import last_line
from rlinf_vla.commands.interrupt import Interrupted
from rlinf_vla.commands.robot_process import EPISODES, FAREWELL_S, WEIGHTS
from rlinf_vla.robot import RobotError
from rlinf_vla.rollout.robot_episode import Job, RobotEpisode
from rlinf_vla.types import UserError

ATTEMPTS = 3
"""So many processes may be lost in a row, with no episode in between."""
START_S = 180.0
"""In which a process imports, builds the policy and connects without a word."""


class RobotSide:
    """Implements ``flow.online.Player``. A context: the process ends with it, and the arm stands."""

    def __init__(self, directory: Path, silence_s: float, say: Callable[[str], None]) -> None:
        self._directory, self._silence, self._say = directory, silence_s, say
        self._process: _Process | None = None
        self._pending: list[Job] = []
        self._lost_in_a_row = 0

    def __enter__(self) -> RobotSide:
        return self

    def __exit__(self, *about: object) -> None:
        if self._process is not None:
            self._process.end()

    def begin(self, job: Job) -> None:
        """Play it after those that were begun before; one whose file is there has been played."""
        if self._path(job).exists():
            return
        self._pending.append(job)
        if self._process is None:
            self._process = _Process(self._directory)
        self._process.give(job)

    def episode(self, job: Job, idle: Callable[[], None]) -> RobotEpisode:
        """Wait for it; ``idle`` is called every now and then. Raises Interrupted where a person beside the robot has left."""
        while job in self._pending:
            self._listen(0.2)
            idle()
        return RobotEpisode.read(self._path(job))

    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """What the next episodes are played with."""
        aside = self._directory / f".{WEIGHTS}"
        save_file({name: value.detach().contiguous() for name, value in weights.items()}, aside, {"version": str(version)})
        aside.replace(self._directory / WEIGHTS)

    def forget(self, job: Job) -> None:
        self._path(job).unlink(missing_ok=True)

    def _path(self, job: Job) -> Path:
        return self._directory / EPISODES / job.file

    def _listen(self, seconds: float) -> None:
        assert self._process is not None
        for answer in self._process.answers(seconds):
            if "played" in answer:
                self._pending = [job for job in self._pending if job.file != answer["played"]]
                self._lost_in_a_row = 0
            elif "waiting" in answer:
                self._say(f"the robot waits for {answer['for']!r}: {answer['waiting']}")
            elif "going_on" in answer:
                self._say(f"the robot goes on: {answer['going_on']}")
            elif "left" in answer:
                self._say(answer["left"])
                raise Interrupted(signal.SIGINT)
            elif "mistake" in answer:
                raise UserError(answer["mistake"])
            elif "robot" in answer:
                raise RobotError(answer["robot"])
            elif "error" in answer:
                raise RuntimeError(answer["error"])
        if reason := self._process.lost(self._silence):
            self._replace(reason)

    def _replace(self, reason: str) -> None:
        assert self._process is not None
        self._lost_in_a_row += 1
        if self._lost_in_a_row == ATTEMPTS:
            raise RuntimeError(f"{ATTEMPTS} processes beside the robot were lost in a row; {reason}")
        self._say(f"{reason}; another one is started")
        self._process.end()
        self._process = _Process(self._directory)
        self._pending = [job for job in self._pending if not self._path(job).exists()]
        for job in self._pending:
            self._process.give(job)


class _Process:
    def __init__(self, directory: Path) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (nameless, and open as long as the process)
        self._process = subprocess.Popen(
            # in our process group: it may read the terminal's keys, and leaves Ctrl-C to us
            [sys.executable, "-m", "rlinf_vla.commands.robot_process", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._heard, self._begun, self._buffer, self._over = time.monotonic(), False, b"", False

    def give(self, job: Job) -> None:
        try:
            self._input.write(json.dumps(asdict(job)).encode() + b"\n")
            self._input.flush()
        except BrokenPipeError:
            self._over = True

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

    def lost(self, silence_s: float) -> str | None:
        if self._over:
            self._process.wait(FAREWELL_S)
            return f"the process beside the robot died (exit code {self._process.returncode}): {self._last_words()}"
        if time.monotonic() - self._heard > (silence_s if self._begun else START_S):
            return f"the process beside the robot said nothing for {time.monotonic() - self._heard:.0f} s: {self._last_words()}"
        return None

    def _last_words(self) -> str:
        return last_line(self._said) or "nothing was printed"

    def end(self) -> None:
        """Its input ends: it makes the arm stand, writes what it has seen, and ends; else it is killed."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        try:
            self._process.wait(FAREWELL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()
        self._said.close()

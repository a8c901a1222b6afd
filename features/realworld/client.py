"""Send jobs to the robot process, receive its episodes as files, and replace it if it is lost."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import save_file
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.channel import ChannelClosed
from rlinf_vla.core.child_process import ATTEMPTS, Child, Losses
from rlinf_vla.core.interrupt import Interrupted
from rlinf_vla.core.io import replacing
from rlinf_vla.features.realworld.episode import Job, RobotEpisode
from rlinf_vla.features.realworld.loop_statistics import control_metrics
from rlinf_vla.features.realworld.process import END, END_S, WEIGHTS
from rlinf_vla.features.realworld.robot import RobotError
from rlinf_vla.runtime.run_directory import EPISODES
from rlinf_vla.telemetry.run_files import CONTROL_FILE

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


class RobotClient:
    """Play episodes in the order given, in another process, concurrently with updates.

    On exit that process ends and the arm stands."""

    def __init__(
        self, directory: Path, connect: Callable[[], RobotLink], say: Callable[[str], None]
    ) -> None:
        """``connect``: starts a robot process, which loads the weights in the run ``directory``."""
        self._directory = directory
        self._connect = connect
        self._say = say
        self.link: RobotLink | None = None
        """To the running robot process; None before the first job."""
        self._pending: list[Job] = []
        self._played = 0
        self._losses = Losses()
        self._version = -1
        """Of the weights published last."""
        self._ended: BaseException | None = None
        """What ends the session, noticed during updates."""

    def __enter__(self) -> RobotClient:
        return self

    def __exit__(self, *about: object) -> None:
        if self.link is not None:
            self.link.end()

    def begin(self, job: Job) -> None:
        """Queue the job after earlier ones, unless its episode file exists."""
        if self._path(job).exists():
            return
        self._pending.append(job)
        if self.link is None:
            self.link = self._connect()
        self.link.give(job)

    def episode(self, job: Job, idle: Callable[[], None]) -> RobotEpisode:
        """Wait for the job's episode, calling ``idle`` repeatedly.

        Raises Interrupted if the operator quit, UserError, RobotError or RuntimeError as the robot
        process reports.
        """
        while job in self._pending:
            if self._ended is not None:
                raise self._ended
            self._listen(0.2)
            idle()
        return RobotEpisode.read(self._path(job))

    def attend(self) -> None:
        """Show faults and replace a lost process; do not wait. Called repeatedly during updates.

        What ends the session is raised by the next ``episode``: until then nothing may be lost.
        """
        if self.link is None or self._ended is not None:
            return
        try:
            self._listen(0.0)
        except (Exception, Interrupted) as error:
            self._ended = error
            self._say(f"the session ends after this iteration's updates: {error}")

    def share(self, weights: Callable[[], Mapping[str, Tensor]], version: int) -> None:
        """Publish the weights of this ``version`` for the next episodes, unless they are the last
        ones published."""
        if version == self._version:
            return
        path = self._directory / WEIGHTS
        self._version = version
        with replacing(path) as aside:
            save_file(
                {name: value.detach().contiguous() for name, value in weights().items()},
                aside,
                {"version": str(version)},
            )
        if self.link is not None:
            self.link.publish(path)

    def forget(self, job: Job, kept: Path | None = None) -> None:
        """Delete an episode that will not be requested again, or move it to directory ``kept``."""
        if kept is None:
            self._path(job).unlink(missing_ok=True)
            return
        kept.mkdir(parents=True, exist_ok=True)
        shutil.move(self._path(job), kept / job.file)

    def control_metrics(self) -> dict[str, float]:
        """Return the control loop's statistics since the beginning of the run, to be logged."""
        path = self._directory / CONTROL_FILE
        return control_metrics(json.loads(path.read_text())) if path.exists() else {}

    def _path(self, job: Job) -> Path:
        return self._directory / EPISODES / job.file

    def _listen(self, seconds: float) -> None:
        assert self.link is not None
        for answer in self.link.answers(seconds):
            if "played" in answer:
                self._pending = [job for job in self._pending if job.file != answer["played"]]
                self._played += 1
            elif "waiting" in answer:
                self._say(f"the robot waits for {answer['for']!r}: {answer['waiting']}")
            elif "going_on" in answer:
                self._say(f"the robot continues: {answer['going_on']}")
            elif "slow" in answer:
                self._say(
                    f"{answer['slow']}: forces and lateness may stop the arm; close other programs on its machine"
                )
            elif "left" in answer:
                self._say(answer["left"])
                raise Interrupted(signal.SIGINT)
            elif "mistake" in answer:
                raise UserError(answer["mistake"])
            elif "robot" in answer:
                raise RobotError(answer["robot"])
            elif "error" in answer:
                raise RuntimeError(answer["error"])
        if reason := self.link.lost():
            self._replace(reason)

    def _replace(self, reason: str) -> None:
        assert self.link is not None
        if self._losses.give_up(self._played):
            raise RuntimeError(f"{ATTEMPTS} robot processes were lost in a row; {reason}")
        self._say(f"{reason}; starting a new one")
        self.link.end()
        self.link = self._connect()
        self._pending = [job for job in self._pending if not self._path(job).exists()]
        for job in self._pending:
            self.link.give(job)


class LocalRobotLink:
    """Implement ``RobotLink`` for a child process, which shares the learner's run directory."""

    def __init__(self, directory: Path, silence_s: float, lock: int | None = None) -> None:
        """``silence_s``: without an answer for this long the process counts as hung. ``lock``: file
        descriptor that the process keeps open, in a separate session, even if it outlives us."""
        self._silence = silence_s
        self._over = False
        # without a lock it stays in our process group: it may read keys, and ignores Ctrl-C
        program = ["-m", "rlinf_vla.features.realworld.process", str(directory)]
        self.child = Child(
            program, files=() if lock is None else (lock,), own_session=lock is not None
        )
        self.child.allow(START_S)

    def give(self, job: Job) -> None:
        self._send(asdict(job), START_S)

    def publish(self, weights: Path) -> None:
        """Do nothing: the process reads the weights in the run directory."""

    def answers(self, seconds: float) -> list[dict[str, Any]]:
        answers = []
        try:
            answer = self.child.channel.receive(seconds)
            while answer is not None:
                answers.append(answer)
                self.child.allow(self._silence)
                answer = self.child.channel.receive(0)
        except ChannelClosed:
            self._over = True
        return answers

    def lost(self) -> str | None:
        if self._over:
            return f"the robot process died (exit code {self.child.wait(END_S)}): {self._output_tail()}"
        if not self.child.remaining:
            return f"the robot process sent nothing for {self.child.allowed:.0f} s: {self._output_tail()}"
        return None

    def end(self) -> None:
        self._send({END: True}, 1.0)
        self.child.end(END_S)

    def _send(self, message: dict[str, Any], timeout: float) -> None:
        with contextlib.suppress(ChannelClosed, BlockingIOError):  # ``lost`` reports why
            self.child.channel.send(message, timeout)

    def _output_tail(self) -> str:
        return self.child.output_tail() or "it printed nothing"

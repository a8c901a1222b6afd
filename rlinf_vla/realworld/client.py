"""Send jobs to the robot process, receive its episodes as files, and replace it if it is lost."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.child_process import ATTEMPTS, Losses
from rlinf_vla.core.interrupt import Interrupted
from rlinf_vla.core.io import replacing
from rlinf_vla.core.robot import RobotError
from rlinf_vla.realworld.episode import Job, RobotEpisode
from rlinf_vla.realworld.link import RobotLink
from rlinf_vla.realworld.loop_statistics import control_metrics
from rlinf_vla.realworld.process import WEIGHTS
from rlinf_vla.runtime.run_directory import EPISODES
from rlinf_vla.telemetry.run_files import CONTROL_FILE


class RobotClient:
    """Implement ``flow.EpisodeRunner``. On exit the robot process ends and the arm stands."""

    def __init__(self, directory: Path, connect: Callable[[], RobotLink], say: Callable[[str], None]) -> None:
        """``connect``: starts a robot process, which loads the weights in the run ``directory``."""
        self._directory, self._connect, self._say = directory, connect, say
        self._link: RobotLink | None = None
        self._pending: list[Job] = []
        self._played, self._losses = 0, Losses()

    def __enter__(self) -> RobotClient:
        return self

    def __exit__(self, *about: object) -> None:
        if self._link is not None:
            self._link.end()

    def begin(self, job: Job) -> None:
        """Queue the job after earlier ones, unless its episode file exists."""
        if self._path(job).exists():
            return
        self._pending.append(job)
        if self._link is None:
            self._link = self._connect()
        self._link.give(job)

    def episode(self, job: Job, idle: Callable[[], None]) -> RobotEpisode:
        """Wait for the job's episode, calling ``idle`` repeatedly.

        Raises Interrupted if the operator quit, UserError, RobotError or RuntimeError as the robot
        process reports.
        """
        while job in self._pending:
            self._listen(0.2)
            idle()
        return RobotEpisode.read(self._path(job))

    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Publish the weights for the next episodes."""
        path = self._directory / WEIGHTS
        with replacing(path) as aside:
            save_file({name: value.detach().contiguous() for name, value in weights.items()}, aside, {"version": str(version)})
        if self._link is not None:
            self._link.publish(path)

    def forget(self, job: Job) -> None:
        self._path(job).unlink(missing_ok=True)

    def control_metrics(self) -> dict[str, float]:
        path = self._directory / CONTROL_FILE
        return control_metrics(json.loads(path.read_text())) if path.exists() else {}

    def _path(self, job: Job) -> Path:
        return self._directory / EPISODES / job.file

    def _listen(self, seconds: float) -> None:
        assert self._link is not None
        for answer in self._link.answers(seconds):
            if "played" in answer:
                self._pending = [job for job in self._pending if job.file != answer["played"]]
                self._played += 1
            elif "waiting" in answer:
                self._say(f"the robot waits for {answer['for']!r}: {answer['waiting']}")
            elif "going_on" in answer:
                self._say(f"the robot continues: {answer['going_on']}")
            elif "left" in answer:
                self._say(answer["left"])
                raise Interrupted(signal.SIGINT)
            elif "mistake" in answer:
                raise UserError(answer["mistake"])
            elif "robot" in answer:
                raise RobotError(answer["robot"])
            elif "error" in answer:
                raise RuntimeError(answer["error"])
        if reason := self._link.lost():
            self._replace(reason)

    def _replace(self, reason: str) -> None:
        assert self._link is not None
        if self._losses.give_up(self._played):
            raise RuntimeError(f"{ATTEMPTS} robot processes were lost in a row; {reason}")
        self._say(f"{reason}; starting a new one")
        self._link.end()
        self._link = self._connect()
        self._pending = [job for job in self._pending if not self._path(job).exists()]
        for job in self._pending:
            self._link.give(job)

"""A session at the simulated Franka whose processes are killed while the arm moves: the learner and the robot process."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos import ROUNDS, STRICT, Round
from franka_session import (
    CELL_YAML,
    SMALL,
    STILL_RAD_S,
    clear_latch,
    is_driven,
    journal,
    pursues,
    wait_until,
)
from trajectory import Trajectory

from rlinf_vla.features.realworld.episode import RobotEpisode
from rlinf_vla.features.realworld.process import LEARNER_GONE, UNDER_WAY
from rlinf_vla.features.realworld.recorder import recover_episode
from rlinf_vla.robots.franka.plugin import read_cell
from rlinf_vla.robots.simulated.client import SimulatedCell
from rlinf_vla.runtime.run_directory import EPISODES
from rlinf_vla.telemetry.metrics import read_metrics

pytestmark = [pytest.mark.simulator, pytest.mark.timeout(900 + 300 * ROUNDS)]

SETTLE_S = 0.5
PATIENCE = 1.0 if STRICT else 8.0
START_S = 240.0
"""Two processes that import PyTorch, on shared cores."""
GONE, DIED = "policy: its process is gone", "the robot process died (exit code -9)"


class Killed:
    """``rlinf-vla train``, restarted in one run directory."""

    def __init__(self, cell: SimulatedCell, run: Path) -> None:
        self.cell = cell
        self.run = run
        self.seen = Trajectory(cell)
        clear_latch(cell.folder)
        limits = cell.folder / "patient.yaml"
        limits.write_text(CELL_YAML)
        self.limits = read_cell(str(limits))
        self._command = [
            sys.executable,
            "-m",
            "rlinf_vla.cli.main",
            "train",
            "recipe=franka_rlpd",
            f"run_dir={run}",
            "resume=auto",
            *SMALL,
        ]
        self._command += [f"robot.folder={cell.folder}", f"robot.cell={limits}"]
        self.said = run.parent / "said.txt"
        self.start()

    def start(self) -> None:
        with self.said.open("ab") as said:
            self.learner = subprocess.Popen(
                self._command, stdout=said, stderr=said, start_new_session=True
            )

    def beside(self) -> int | None:
        """The robot process."""
        children = (
            Path(f"/proc/{self.learner.pid}/task/{self.learner.pid}/children").read_text().split()
        )
        return next(
            (int(each) for each in children if b"realworld.process" in _cmdline(int(each))), None
        )

    def wait_moving(self) -> None:
        """Waits for an episode."""
        since = [time.monotonic()]

        def moving() -> bool:
            assert self.learner.poll() is None, self.said.read_text()
            if not pursues(self.cell.folder) or self.seen.samples[-1][1] < 2 * STILL_RAD_S:
                since[0] = time.monotonic()
            return time.monotonic() - since[0] > 0.3

        wait_until(moving, START_S, "an episode is running")

    def kill(self, pid: int, fault: str) -> tuple[float, float]:
        """The time of the fault, and for how long the arm still moved."""
        when = time.monotonic()
        before = len(journal(self.cell.folder))
        os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: any(each["event"] == "end" for each in journal(self.cell.folder)[before:]),
            30,
            "the arm's process ends",
        )
        latched = [
            each["fault"] for each in journal(self.cell.folder)[before:] if each["event"] == "end"
        ]
        assert latched[0] == fault, latched
        wait_until(
            lambda: self.seen.samples[-1][0] > when + self.stated_s,
            60,
            "it was observed long enough",
        )
        stood = self.seen.last_moving(when, STILL_RAD_S) - when
        assert stood <= PATIENCE * self.stated_s, (
            f"it stopped after {stood:.2f} s; the bound is {self.stated_s:.2f} s"
        )
        return when, stood

    def wait_acknowledged(self, fault: str, before: int) -> None:
        """After the ``before``-th line of the journal the arm's process ended; the next one found the fault and waited."""

        def since() -> list[tuple[str, str | None]]:
            events = [
                (each["event"], each.get("fault"))
                for each in journal(self.cell.folder)[before:]
                if each["event"] != "interventions"
            ]
            return events[events.index(("end", fault)) :]

        wait_until(lambda: ("homing", None) in since(), START_S, "the arm goes home")
        assert since()[1:4] == [
            ("fault found at the start", fault),
            ("acknowledged", fault),
            ("homing", None),
        ]

    @property
    def stated_s(self) -> float:
        """Two ticks of the control loop, one of the servo."""
        return (
            2 / self.limits.control_hz
            + 1 / self.limits.servo_hz
            + self.limits.stop_time_s
            + SETTLE_S
        )

    def played(self) -> int:
        return sum("rollout/steps" in line for line in read_metrics(self.run))

    def wait_played(self, more_than: int) -> None:
        wait_until(
            lambda: self.played() > more_than, START_S, "another episode was used for training"
        )

    def close(self) -> None:
        """Until the arm may be driven by another."""
        beside = self.beside() if self.learner.poll() is None else None
        self.learner.kill()
        self.learner.wait()
        wait_until(
            lambda: beside is None or not _cmdline(beside), 30, "the process beside the robot ends"
        )
        wait_until(lambda: not is_driven(self.cell.folder), 30, "the arm's process ends")
        self.seen.close()


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def killed(cell: SimulatedCell, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    made = Killed(cell, tmp_path_factory.mktemp("killed") / "run")
    try:
        yield made
    finally:
        made.close()


def test_a_killed_policy_process_stops_the_arm_and_is_replaced(
    killed: Killed, rounds: list[Round]
) -> None:
    def its_round() -> float:
        killed.wait_moving()
        beside = killed.beside()
        played = killed.played()
        kept = set((killed.run / EPISODES).glob("training_*"))
        assert beside is not None
        said = killed.said.read_text().count(DIED)
        before = len(journal(killed.cell.folder))
        _, stood = killed.kill(beside, GONE)
        assert all(len(RobotEpisode.read(path)) for path in kept if path.exists()), "complete files"
        cut = recover_episode(killed.run / EPISODES / UNDER_WAY)
        wait_until(
            lambda: cut is None or (killed.run / EPISODES / cut.job.file).exists(),
            START_S,
            "its recorded data is there",
        )
        killed.wait_played(played)
        assert killed.said.read_text().count(DIED) == said + 1
        killed.wait_acknowledged(GONE, before)
        return stood

    _play("killed_policy_process", killed, its_round, rounds)


def test_a_killed_learner_stops_the_arm_and_resumes(killed: Killed, rounds: list[Round]) -> None:
    def its_round() -> float:
        killed.wait_moving()
        beside = killed.beside()
        played = killed.played()
        before = len(journal(killed.cell.folder))
        assert beside is not None
        when, stood = killed.kill(killed.learner.pid, f"policy: {LEARNER_GONE}")
        killed.learner.wait()
        wait_until(lambda: not _cmdline(beside), 30, "the robot process ends")
        newest = max(
            (killed.run / EPISODES).glob("training_*"), key=lambda path: path.stat().st_mtime_ns
        )
        cut = RobotEpisode.read(newest)
        assert cut.ended == LEARNER_GONE and len(cut) and not cut.terminated, cut.ended
        assert newest.stat().st_mtime > time.time() - (time.monotonic() - when) - 1, (
            "it is the episode that was running"
        )
        written = newest.stat().st_mtime_ns
        killed.start()
        killed.wait_played(played)
        assert not newest.exists() or newest.stat().st_mtime_ns == written, "it is not repeated"
        killed.wait_acknowledged(f"policy: {LEARNER_GONE}", before)
        return stood

    _play("killed_learner", killed, its_round, rounds)


def _play(fault: str, killed: Killed, its_round: Callable[[], float], rounds: list[Round]) -> None:
    """A failed round is reported, and the next one follows."""
    found = []
    for _ in range(ROUNDS or 1):
        stood = math.nan
        wrong = None
        try:
            stood = its_round()
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
            if killed.learner.poll() is not None:
                killed.start()
        found.append(Round(fault, "franky-sim", stood, killed.stated_s, wrong))
    rounds += found
    assert [each.wrong for each in found] == [None] * len(found)

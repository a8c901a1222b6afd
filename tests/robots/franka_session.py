"""A robot of a policy's process at the simulated cell, and the truth about its arm."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_vla.features.realworld.robot import RobotState, ToolPose, ToolTarget
from rlinf_vla.robots.franka import messages
from rlinf_vla.robots.franka.plugin import franka_sim
from rlinf_vla.robots.runtime_folder import JOURNAL, LOCK, STATE, Latch
from rlinf_vla.robots.shared_record import SharedRecord
from rlinf_vla.robots.simulated.client import SimulatedCell

STILL_RAD_S = 0.05
CELL_YAML = (
    (Path(__file__).parents[2] / "robots/cells/franka_sim.yaml")
    .read_text()
    .replace("heartbeat_timeout_s: 0.5 ", "heartbeat_timeout_s: 2 ")
    .replace("max_state_age_s: 0.3 ", "max_state_age_s: 0.5 ")
)
"""With larger time limits than the shipped one, because tests share the machine with other work."""

SMALL = (
    *(
        "iterations=100000",
        "cluster=laptop",
        "evaluation.before_and_after=false",
        "checkpoints.every=1",
        "session.learner_nice=0",
    ),
    *(
        "algorithm.demonstrations=0",
        "algorithm.episodes=1",
        "algorithm.batch_size=16",
        "algorithm.updates_per_step=0.05",
    ),
    # the scene's expert keeps the arm moving; a process that a test left behind ends by itself
    *(
        "session.minutes=120",
        "session.patience_s=0.2",
        "env.episode_limit=60",
        "robot.max_age_s=2",
        "robot.frozen_s=5",
        "control.max_misses=100",
    ),
)
"""Arguments of ``rlinf-vla train``: minimal learning without end, and an arm that moves."""


def journal(folder: Path) -> list[dict[str, Any]]:
    """Events of the arm, oldest first, without a line that is being written."""
    return [
        json.loads(line)
        for line in (folder / JOURNAL).read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def clear_latch(folder: Path) -> None:
    latch = Latch(folder)
    while latch.fault is not None:
        latch.release()


def pursues(folder: Path) -> bool:
    """The arm of this folder has a command: an episode is running."""
    try:
        data = SharedRecord(folder / STATE).read()
    except (OSError, ValueError):
        return False
    return data is not None and messages.unpack(data).commanded is not None


def is_driven(folder: Path) -> bool:
    """Whether a process holds the lock of this folder's arm: until it has exited, which is later than the last line of its journal.

    Nobody may start to drive the arm meanwhile, because this takes the lock for a moment.
    """
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> float:
    """Returns the seconds that it took."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.01)
    return time.monotonic() - begun


class Session:
    """A robot of a policy's process, and the truth about its arm."""

    def __init__(self, cell: SimulatedCell) -> None:
        self.cell = cell
        self.folder = cell.folder
        clear_latch(self.folder)
        (self.folder / "patient.yaml").write_text(CELL_YAML)
        self.config = franka_sim.Config(
            folder=str(self.folder), cell=str(self.folder / "patient.yaml"), cameras=[]
        )
        self.robot = franka_sim.make(self.config)
        self.robot.connect(30)

    def reconnect(self) -> None:
        """As the next process would: with a new process of the arm."""
        self.robot.close()
        self.robot = franka_sim.make(self.config)
        self.robot.connect(30)

    @property
    def speed(self) -> float:
        """Speed of the fastest joint, as the simulator reports it."""
        return float(np.abs(self.cell.truth().joint_velocities).max())

    def move(
        self,
        seconds: float,
        *,
        by: tuple[float, float, float] = (0.01, 0.005, -0.01),
        width: float | None = None,
    ) -> RobotState:
        """Goals at 10 Hz, as a policy gives them."""
        state = self.robot.observe()
        position = state.pose.position.copy()
        for _ in range(round(10 * seconds)):
            position = position + np.array(by)
            self.robot.command(
                ToolTarget(ToolPose(position, state.pose.quaternion), width),
                time.monotonic() + 0.25,
            )
            time.sleep(0.1)
            self.robot.observe()
        return self.robot.observe()

    def wait_still(self, seconds: float) -> float:
        """For a tenth of a second, so that a turning point does not count as rest."""
        since = [time.monotonic()]

        def still() -> bool:
            if self.speed > STILL_RAD_S:
                since[0] = time.monotonic()
            return time.monotonic() - since[0] > 0.1

        return wait_until(still, seconds, "the arm is at rest")

    def wait_fault(self, seconds: float) -> str:
        wait_until(lambda: self.robot.observe().fault, seconds, "a fault is latched")
        return str(self.robot.observe().fault)

    def acknowledge(self) -> None:
        """Repeats until it succeeds, as an operator would."""

        def sound() -> bool:
            if self.robot.observe().fault is not None and self.robot.refusal is not None:
                print("refused:", self.robot.refusal)
                self.robot.acknowledge("tester")
            return self.robot.observe().fault is None

        self.robot.acknowledge("tester")
        wait_until(sound, 15, f"the arm recovers from {self.robot.observe().fault}")

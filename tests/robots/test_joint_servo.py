"""The servo of an arm that is moved by its joints, on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlinf_vla.features.realworld.robot import JointTarget, RobotState, Vector
from rlinf_vla.robots import cell_file
from rlinf_vla.robots.joint_cell import JointCell
from rlinf_vla.robots.lerobot.servo import JointServo
from rlinf_vla.robots.runtime_folder import Journal, Latch

CELL = cell_file.load(cell_file.CELLS / "so101_sim.yaml", JointCell)
HOME = np.array(CELL.home)


class Arm:
    """Follows at once."""

    problem: str | None = None
    homing = controlled = False

    def __init__(self) -> None:
        self.now = 0.0
        self.joints = HOME
        self.tracking = False

    @property
    def measured(self) -> RobotState:
        return RobotState(self.now, self.joints, np.zeros(6))

    def track(self, positions: Vector) -> None:
        self.joints = positions
        self.tracking = True

    def rest(self) -> None:
        self.tracking = False

    def home(self) -> None:
        self.homing = True

    def halt(self) -> None:
        self.homing = False


class Bench:
    def __init__(self, folder: Path) -> None:
        self.arm = Arm()
        self.now = 100.0
        self.journal = Journal(folder / "journal")
        self.servo = JointServo(CELL, self.arm, Latch(folder), self.journal)  # type: ignore[arg-type]

    def run(self, seconds: float, *, heard: bool = True) -> RobotState:
        for _ in range(round(seconds * CELL.servo_hz)):
            self.now += 1 / CELL.servo_hz
            self.arm.now = self.now
            if heard:
                self.servo.hear(self.now)
            state, _ = self.servo.tick(self.now)
        return state

    def goal(self, degrees: float) -> None:
        self.servo.pursue(
            JointTarget(self.arm.joints + degrees * np.eye(6)[1]), self.now + 0.25, self.now
        )


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    yield (made := Bench(tmp_path))
    made.journal.close()


def test_a_goal_is_reached_and_then_nothing_is_sent(bench: Bench) -> None:
    bench.run(0.1)
    bench.goal(5.0)
    bench.run(0.1)
    assert bench.arm.tracking
    state = bench.run(1.5)
    assert state.fault is None and state.commanded is None and not bench.arm.tracking
    np.testing.assert_allclose(state.joints, HOME + 5 * np.eye(6)[1], atol=1e-6)


def test_silence_stops_the_arm_and_is_latched_until_it_is_acknowledged(bench: Bench) -> None:
    bench.run(0.1)
    bench.goal(5.0)
    fault = bench.run(1.5, heard=False).fault
    assert fault is not None and "said nothing" in fault
    before = bench.arm.joints
    bench.goal(5.0)
    bench.run(0.5)
    np.testing.assert_array_equal(bench.arm.joints, before)
    bench.servo.acknowledge("Ada")
    bench.goal(2.0)
    assert bench.run(0.5).fault is None
    assert (bench.arm.joints != before).any()


def test_a_stop_while_homing_halts_it(bench: Bench) -> None:
    bench.servo.home()
    bench.run(0.1)
    assert bench.arm.homing and not bench.servo.standing
    bench.servo.stop("stopped by Ada", bench.now)
    bench.run(0.1)
    assert not bench.arm.homing and bench.servo.standing


def test_an_arm_outside_its_limits_does_not_start(bench: Bench) -> None:
    bench.arm.joints = HOME + 60 * np.eye(6)[2]
    bench.run(0.1)
    bench.goal(1.0)
    fault = bench.run(0.2).fault
    assert fault is not None and "elbow_flex stands at 96" in fault and not bench.arm.tracking

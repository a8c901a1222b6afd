"""The servo on a virtual clock, with an arm that follows commands at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from obedient import CELL, ObedientArm, ObedientGripper

from rlinf_vla.features.realworld.robot import RobotState, ToolPose, ToolTarget
from rlinf_vla.robots.franka.messages import pack, unpack
from rlinf_vla.robots.franka.servo import Servo
from rlinf_vla.robots.runtime_folder import Journal, Latch


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.arm = ObedientArm()
        self.gripper = ObedientGripper()
        self.now = 100.0
        self.journals: list[Journal] = []
        self.servo = self.make()

    def make(self) -> Servo:
        self.journals.append(Journal(self.folder / "journal"))
        return Servo(CELL, self.arm, self.gripper, Latch(self.folder), self.journals[-1])

    def run(self, seconds: float, *, heard: bool = True) -> RobotState:
        for _ in range(round(seconds * CELL.servo_hz)):
            self.now += 1 / CELL.servo_hz
            self.arm.now = self.now
            if heard:
                self.servo.hear(self.now)
            state, _ = self.servo.tick(self.now)
        return state

    def goal(self, dx: float, valid_s: float = 0.25, width: float | None = None) -> None:
        target = ToolPose(self.arm.pose.position + np.array([dx, 0.0, 0.0]), CELL.home.quaternion)
        self.servo.pursue(ToolTarget(target, width), self.now + valid_s, self.now)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    yield (made := Bench(tmp_path))
    for journal in made.journals:
        journal.close()


def test_nothing_moves_before_the_first_goal(bench: Bench) -> None:
    state = bench.run(1.0)
    assert state.commanded is None and not bench.arm.on_springs


def test_a_goal_is_reached_and_then_held_by_the_arms_own_controller(bench: Bench) -> None:
    begin = bench.arm.pose.position[0]
    bench.run(0.1)
    bench.goal(0.01, width=0.03)
    bench.run(0.2)
    assert bench.arm.on_springs
    state = bench.run(1.5)
    assert bench.arm.pose.position[0] == pytest.approx(begin + 0.01, abs=1e-6)
    assert bench.gripper.width == 0.03
    assert state.fault is None and state.commanded is None and not bench.arm.on_springs


def test_a_goal_expires(bench: Bench) -> None:
    begin = bench.arm.pose.position[0]
    bench.goal(0.02, valid_s=0.02)
    bench.run(2.0)
    assert bench.arm.pose.position[0] < begin + 0.015


def test_no_goal_is_valid_for_longer_than_the_limit_of_the_cell(bench: Bench) -> None:
    bench.goal(0.01, valid_s=1e9)
    bench.run(CELL.max_goal_validity_s + 2 * CELL.stop_time_s + 0.1)
    assert not bench.arm.on_springs


def test_late_goals_are_counted(bench: Bench) -> None:
    bench.goal(0.001, valid_s=0.02)
    for late in range(int(CELL.expired_goals_to_stop)):
        assert bench.run(0.1).fault is None, late
        bench.goal(0.001, valid_s=0.02)
    assert "late" in str(bench.run(0.1).fault)


def test_goals_in_time_are_not_counted_as_late(bench: Bench) -> None:
    for _ in range(3 * int(CELL.expired_goals_to_stop)):
        bench.goal(0.001)
        assert bench.run(0.1).fault is None


def test_silence_of_the_policys_process_is_a_fault_only_while_it_moves_the_arm(
    bench: Bench,
) -> None:
    assert bench.run(2.0, heard=False).fault is None
    bench.servo.hear(bench.now)
    bench.goal(0.001)
    assert bench.run(CELL.heartbeat_timeout_s - 0.05, heard=False).fault is None
    assert "has said nothing" in str(bench.run(0.1, heard=False).fault)


@pytest.mark.parametrize("cause", ["problem", "gripper", "stale", "force"])
def test_each_cause_is_latched_and_stops_the_arm(bench: Bench, cause: str) -> None:
    bench.goal(0.004)
    bench.run(0.1)
    if cause == "problem":
        bench.arm.problem = "reflex: joint_reflex"
    elif cause == "gripper":
        bench.gripper.problem = "gripper: stuck"
    elif cause == "stale":
        bench.arm.stale_s = 1.0
    else:
        bench.arm.wrench = np.array([CELL.max_force_n + 1, 0, 0, 0, 0, 0])
    state = bench.run(1.0)
    expected = {
        "problem": "reflex",
        "gripper": "gripper: stuck",
        "stale": "network",
        "force": "max_force_n",
    }[cause]
    assert str(state.fault).startswith(expected)
    assert bench.servo.standing and (cause == "problem" or not bench.arm.on_springs)
    bench.arm.problem = None
    bench.gripper.problem = None
    bench.arm.stale_s = 0.0
    bench.arm.wrench = np.zeros(6)
    at = bench.arm.pose
    bench.goal(0.004)
    assert bench.run(0.5).fault == state.fault and bench.arm.pose is at, (
        "it is latched, and goals are refused"
    )
    bench.servo.acknowledge("tester")
    bench.goal(0.004)
    assert bench.run(0.2).fault is None and bench.arm.pose is not at


@pytest.mark.parametrize(("pace", "tells"), [(0.43, True), (0.95, False)])
def test_a_fault_in_a_slow_simulation_says_so(bench: Bench, pace: float, tells: bool) -> None:
    bench.arm.pace = pace
    bench.goal(0.004)
    bench.run(0.1)
    bench.arm.wrench = np.array([CELL.max_force_n + 1, 0, 0, 0, 0, 0])
    state = bench.run(0.1)
    assert str(state.fault).endswith("(the arm's clock runs at 0.43 of real time)") == tells
    assert str(state.fault).startswith("max_force_n: ") and unpack(pack(state)).pace == pace


def test_a_released_arm_comes_to_rest_and_nothing_is_latched(bench: Bench) -> None:
    bench.goal(0.02)
    bench.run(0.1)
    bench.servo.release()
    assert not bench.servo.standing
    assert bench.run(1.0).fault is None
    assert bench.servo.standing and not bench.arm.on_springs
    bench.servo.home()
    assert not bench.servo.standing
    bench.servo.release()
    bench.run(3 / CELL.servo_hz)
    assert bench.arm.halted == 3, "home is interrupted until it has stopped"


def test_the_time_of_the_filter_is_recorded_at_each_tick(bench: Bench) -> None:
    bench.run(0.2)
    assert bench.servo.took == []
    bench.goal(0.02)
    bench.run(0.1)
    assert len(bench.servo.took) == CELL.ticks_per_step and min(bench.servo.took) > 0


def test_the_first_fault_keeps_its_name(bench: Bench) -> None:
    bench.servo.stop("stopped by tester", bench.now)
    bench.arm.problem = "reflex: joint_reflex"
    assert bench.run(0.1).fault == "stopped by tester"


@pytest.mark.parametrize("fault", ["policy: its process is gone", "stopped by tester"])
def test_a_fault_outlives_the_arms_process(bench: Bench, fault: str) -> None:
    bench.servo.stop(fault, bench.now)
    for _ in range(2):
        assert bench.make().fault == fault
    bench.make().acknowledge("tester")
    assert bench.make().fault is None


def test_a_persons_stop_is_a_latch_of_its_own(bench: Bench) -> None:
    bench.servo.stop("max_force_n: 50.0 N measured, 40 allowed", bench.now)
    for name in ("Bob", "Bob", "Eve"):
        bench.servo.stop(f"stopped by {name}", bench.now)
    bench.servo.stop("policy: another reason", bench.now)
    at = bench.arm.pose
    for left in ("stopped by Bob", "stopped by Eve"):
        bench.servo.acknowledge("Ada")
        bench.goal(0.004)
        assert bench.run(0.5).fault == left == bench.make().fault and bench.arm.pose is at
    bench.servo.acknowledge("Ada")
    bench.goal(0.004)
    assert bench.run(0.5).fault is None and bench.arm.pose is not at and bench.make().fault is None


@given(fault=st.text(st.characters(exclude_categories=()), min_size=1, max_size=2000))
@settings(
    max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_any_text_can_be_latched_shown_and_acknowledged(bench: Bench, fault: str) -> None:
    bench.servo.stop(f"stopped by {fault}", bench.now)
    shown = unpack(pack(bench.run(0.02))).fault
    assert (
        shown is not None
        and shown == bench.servo.fault == bench.make().fault
        and shown.isprintable()
    )
    bench.servo.acknowledge(fault)
    assert bench.run(0.02).fault is None and bench.make().fault is None


@pytest.mark.parametrize("until", [math.nan, math.inf, -math.inf])
def test_a_goal_that_never_expires_is_a_fault(bench: Bench, until: float) -> None:
    at = bench.arm.pose
    bench.goal(0.02, valid_s=until)
    assert (
        str(bench.run(0.5).fault).startswith("policy: a goal that is valid until")
        and bench.arm.pose is at
    )


def test_it_does_not_start_in_an_invalid_state(bench: Bench) -> None:
    bench.arm.pose = ToolPose(np.array([0.3, 0.0, 2.0]), CELL.home.quaternion)
    bench.goal(0.001)
    assert bench.run(0.1).fault is not None


def test_goals_are_refused_during_home(bench: Bench) -> None:
    bench.servo.home()
    at = bench.arm.pose
    bench.goal(0.01)
    bench.run(0.2)
    assert bench.arm.pose is at


def test_commands_are_within_the_cells_speed(bench: Bench) -> None:
    """By finite differences of the commands that reach the arm."""
    before = bench.arm.pose.position
    fastest = 0.0
    for _ in range(20):
        bench.goal(1.0)
        for _ in range(CELL.ticks_per_step):
            bench.run(1 / CELL.servo_hz)
            fastest = max(
                fastest, float(np.linalg.norm(bench.arm.pose.position - before)) * CELL.servo_hz
            )
            before = bench.arm.pose.position
    assert 0 < fastest <= CELL.max_speed_m_s * 1.0001


def test_a_fault_found_at_the_start_outlives_its_cause(bench: Bench) -> None:
    bench.arm.problem = "user stop: pressed at the arm"
    assert bench.make().fault == bench.arm.problem
    bench.arm.problem = None
    assert bench.make().fault == "user stop: pressed at the arm"


def test_a_stopped_home_is_interrupted_until_it_ends(bench: Bench) -> None:
    bench.servo.home()
    bench.run(0.1)
    bench.servo.stop("stopped by tester", bench.now)
    bench.run(0.2)
    assert bench.arm.halted >= 5, "the first stop may precede the motion"
    bench.arm.homing = False
    halted = bench.arm.halted
    bench.run(0.1)
    assert bench.arm.halted == halted


def test_forces_and_silence_stop_home(bench: Bench) -> None:
    bench.servo.home()
    assert bench.run(0.1).fault is None
    bench.arm.wrench = np.array([CELL.max_force_n + 1, 0, 0, 0, 0, 0])
    assert str(bench.run(0.1).fault).startswith("max_force_n: ")
    bench.arm.wrench = np.zeros(6)
    bench.arm.homing = False
    bench.servo.acknowledge("tester")
    bench.servo.home()
    assert str(bench.run(CELL.heartbeat_timeout_s + 0.1, heard=False).fault).startswith(
        "policy: its process has said nothing"
    )


def test_an_arm_in_contact_may_go_home_if_the_force_decreases(bench: Bench) -> None:
    pressing = np.array([0, 0, CELL.max_force_n + 10, 0, 0, 0])
    bench.arm.wrench = pressing
    bench.servo.home()
    assert bench.run(0.5).fault is None
    bench.arm.wrench = np.zeros(6)
    assert bench.run(2.0).fault is None
    bench.arm.homing = False
    bench.run(0.1)
    bench.arm.wrench = pressing
    bench.servo.home()
    assert str(bench.run(1.5).fault).startswith("max_force_n: ")

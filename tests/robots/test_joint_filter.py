"""The safety filter of joints: no goal, however wild, makes a command beyond a limit of the cell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.features.realworld.robot import CellError, JointTarget, RobotError, RobotState
from rlinf_vla.robots import cell_file
from rlinf_vla.robots.joint_cell import JointCell
from rlinf_vla.robots.joint_filter import JointFilter, JointGate

CELL = cell_file.load(cell_file.CELLS / "so101_sim.yaml", JointCell)
HOME = np.array(CELL.home)
TICK = 1 / CELL.servo_hz


def state(joints: np.ndarray = HOME) -> RobotState:
    return RobotState(0.0, joints, np.zeros(6))


class Bench:
    """An arm that follows at once, unless ``blocked``."""

    def __init__(self) -> None:
        self.filter = JointFilter(CELL)
        self.at = HOME.copy()
        self.blocked = False
        self.filter.start(state())
        self.commands = [HOME] * 3
        self.told: list[str] = []
        self.fault: str | None = None

    def run(self, ticks: int, goal: JointTarget | None) -> None:
        for _ in range(ticks):
            found = self.filter.step(goal, state(self.at), TICK)
            self.fault = self.fault or found.fault
            self.told += [each.rule for each in found.interventions]
            self.commands.append(found.command.positions)
            self.at = self.at if self.blocked else found.command.positions

    def check(self) -> None:
        way = np.array(self.commands)
        assert (way >= np.array(CELL.lower) - 1e-6).all() and (
            way <= np.array(CELL.upper) + 1e-6
        ).all()
        for order, key in enumerate(("max_speed", "max_acceleration", "max_jerk"), 1):
            found = np.abs(np.diff(way, order, axis=0)) / TICK**order
            assert (found <= np.array(getattr(CELL, key)) * (1 + 1e-6) + 1e-3).all(), key


wild = st.lists(
    st.one_of(st.floats(-200, 200), st.sampled_from([np.nan, np.inf, 1e300])),
    min_size=5,
    max_size=7,
)


@given(st.lists(st.tuples(wild, st.integers(1, 12)), min_size=1, max_size=12))
def test_no_goal_makes_a_command_beyond_a_limit(goals: list[tuple[list[float], int]]) -> None:
    bench = Bench()
    for numbers, ticks in goals:
        bench.run(ticks, JointTarget(np.array(numbers)))
    bench.check()
    assert bench.fault is None


def test_a_goal_within_all_limits_is_reached_without_intervention() -> None:
    bench = Bench()
    wanted = HOME + np.array([5.0, -5, 5, -5, 10, -20])
    bench.run(CELL.ticks_per_step + CELL.windows.length, JointTarget(wanted))
    np.testing.assert_allclose(bench.at, wanted, atol=1e-6)
    assert bench.told == [] and bench.fault is None


def test_what_changes_a_goal_is_told_once_with_its_joint() -> None:
    bench = Bench()
    bench.run(10, JointTarget(HOME + np.array([0, 0, 200.0, 0, 0, 0])))
    assert bench.told == ["upper elbow_flex", "max_speed elbow_flex"]


def test_without_a_goal_the_command_stands_within_the_stop_time() -> None:
    bench = Bench()
    for step in range(1, 8):
        bench.run(CELL.ticks_per_step, JointTarget(HOME + np.array([6.0 * step, 0, 0, 0, 0, 0])))
    bench.run(round(CELL.stop_time_s * CELL.servo_hz) + 1, None)
    before = bench.at
    bench.run(20, None)
    np.testing.assert_allclose(bench.at, before, atol=1e-9)
    bench.check()


def test_a_blocked_joint_is_a_fault_and_a_blocked_gripper_is_not() -> None:
    bench = Bench()
    bench.blocked = True
    for _ in range(3):
        bench.run(10, JointTarget(HOME + np.array([0, 0, 0, 0, 0, -90.0])))
    bench.run(100, None)
    assert bench.fault is None
    for step in range(1, 12):
        bench.run(5, JointTarget(HOME + np.array([5.0 * step, 0, 0, 0, 0, 0])))
    bench.run(50, None)
    assert bench.fault is not None and bench.fault.startswith(
        "max_deviation: shoulder_pan is 25.0"
    ), "max_lead bounds it"
    bench.check()


def test_it_starts_only_within_the_limits() -> None:
    with pytest.raises(RobotError, match="elbow_flex stands at 120"):
        JointFilter(CELL).start(state(HOME + np.array([0, 0, 84.0, 0, 0, 0])))
    with pytest.raises(RobotError, match="not finite"):
        JointFilter(CELL).start(state(np.full(6, np.nan)))


E = np.eye(6)


@pytest.mark.parametrize(
    ("moved", "told"),
    [
        (2 * E[0], "max_speed"),
        (E[1], "max_acceleration"),
        (np.full(6, np.nan), "finite"),
        (-90 * E[2], "max_speed"),
        (E[5], "lower, upper"),
    ],
)
def test_the_gate_refuses_what_the_filter_never_makes(moved: np.ndarray, told: str) -> None:
    gate = JointGate(CELL)
    gate.rest(HOME)
    assert told in str(gate.check(HOME + moved))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lower": [0] * 5}, "lower: has 5 numbers"),
        ({"home": [0, -44, 36, 95, 0, 100]}, "home: wrist_flex at 95"),
        ({"max_lead": [25, 5, 25, 25, 50, 100]}, "max_lead: shoulder_lift's 5"),
        ({"max_speed": [40, 60, 60, 60, 120, 200]}, "max_speed: shoulder_pan's 40"),
        ({"grippers": ["claw"]}, "grippers: claw"),
        ({"joints": "elbow"}, "joints: 'elbow'"),
        ({"max_jerk": [1000] * 6, "max_lead": [500] * 6}, "a stop takes"),
        ({"servo_hz": 25}, "servo_hz: 25"),
    ],
)
def test_a_contradictory_cell_is_refused_by_name(changes: dict[str, object], told: str) -> None:
    with pytest.raises(CellError, match=told):
        cell_file.of(cell_file.as_json(CELL) | changes, "cell", JointCell)


def test_a_cell_survives_its_way_to_the_process() -> None:
    assert replace(cell_file.of(cell_file.as_json(CELL), CELL.name, JointCell)) == CELL

"""The driver of a LeRobot robot, with a robot made up in its place: LeRobot need not be installed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlinf_vla.features.realworld.robot import RobotError, RobotState
from rlinf_vla.robots import cell_file
from rlinf_vla.robots.joint_cell import JointCell
from rlinf_vla.robots.lerobot import driver, messages
from rlinf_vla.robots.lerobot.driver import LeRobotArm

CELL = cell_file.load(cell_file.CELLS / "so101_sim.yaml", JointCell)
FAST = replace(CELL, home_speed=(1e4,) * 6)
HOME = np.array(CELL.home)


class MadeUp:
    """Implements LeRobot's ``Robot``; reaches what it is sent at once, unless it is stuck."""

    def __init__(self) -> None:
        self.joints = {f"{name}.pos": float(at) for name, at in zip(CELL.joints, HOME, strict=True)}
        self.action_features = dict.fromkeys(self.joints, float)
        self.observation_features: dict[str, Any] = {**self.action_features, "front": (480, 640, 3)}
        self.is_calibrated = True
        self.stuck = False
        self.broken = False
        self.closed = 0

    def connect(self, calibrate: bool) -> None:
        assert not calibrate, "which would wait for a person's input"

    def disconnect(self) -> None:
        self.closed += 1
        if self.closed > 1:
            raise RuntimeError("not connected")

    def get_observation(self) -> dict[str, Any]:
        if self.broken:
            raise ConnectionError("Failed to sync read\n[TxRxResult] There is no status packet!")
        return {**self.joints, "front": None}

    def send_action(self, action: dict[str, float]) -> None:
        if not self.stuck:
            self.joints = dict(action)


@pytest.fixture
def robot(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    made = MadeUp()
    monkeypatch.setattr(driver, "make", lambda kind, module, options: made)
    return made


@pytest.fixture
def connect(robot: MadeUp) -> Iterator[Callable[[], LeRobotArm]]:
    arms: list[LeRobotArm] = []

    def connected() -> LeRobotArm:
        arms.append(LeRobotArm("made_up", None, {}, FAST))
        return arms[-1]

    yield connected
    for arm in arms:
        arm.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120  # only bounds a hang
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_measures_and_follows(connect: Callable[[], LeRobotArm], robot: MadeUp) -> None:
    arm = connect()
    np.testing.assert_array_equal(arm.measured.joints, HOME)
    arm.track(HOME + 1)
    until(lambda: bool((arm.measured.joints == HOME + 1).all()))
    arm.rest()
    last = arm.measured
    until(lambda: arm.measured is not last)  # what the thread was sending is sent
    robot.joints["gripper.pos"] = 30.0  # somebody moves it
    until(lambda: arm.measured.joints[-1] == 30.0)
    assert arm.problem is None and not arm.controlled


def test_it_goes_home_and_can_be_halted(
    connect: Callable[[], LeRobotArm], robot: MadeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "SETTLE_S", 120.0)  # the thread may stand still on the way
    robot.joints["elbow_flex.pos"] = 0.0
    arm = connect()
    arm.home()
    until(lambda: not arm.homing)
    np.testing.assert_allclose(arm.measured.joints, HOME, atol=10)
    assert arm.problem is None
    arm.home()
    arm.halt()
    assert not arm.homing and arm.problem is None


def test_a_joint_that_does_not_come_home_is_named(
    connect: Callable[[], LeRobotArm], robot: MadeUp
) -> None:
    robot.joints["elbow_flex.pos"] = 0.0
    robot.stuck = True
    arm = connect()
    arm.home()
    until(lambda: not arm.homing)
    assert arm.problem is not None and "elbow_flex does not reach its rest position" in arm.problem


def test_a_lost_connection_is_a_problem_of_one_line(
    connect: Callable[[], LeRobotArm], robot: MadeUp
) -> None:
    arm = connect()
    robot.broken = True
    until(lambda: arm.problem is not None)
    assert str(arm.problem).startswith("network: ") and "\n" not in str(arm.problem)
    arm.close()
    arm.close()
    assert robot.closed == 2


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"is_calibrated": False}, "lerobot-calibrate"),
        (
            {"action_features": {"x.pos": float}},
            r"joints: the cell's are shoulder_pan.pos.* action_features are x.pos",
        ),
        ({"observation_features": {"front": (1, 2, 3)}}, "observation_features"),
        ({"broken": True}, "made_up does not answer: Failed to sync read"),
    ],
)
def test_a_robot_that_does_not_fit_is_refused(
    connect: Callable[[], LeRobotArm], robot: MadeUp, changes: dict[str, Any], told: str
) -> None:
    vars(robot).update(changes)
    with pytest.raises(RobotError, match=told) as error:
        connect()
    assert "\n" not in str(error.value) and robot.closed == 1


@pytest.mark.parametrize("commanded", [None, messages.unpack_target([1.5] * 6)])
@pytest.mark.parametrize("fault", [None, "max_deviation: élan"])
def test_a_state_is_transferred_unchanged(commanded: Any, fault: str | None) -> None:
    state = RobotState(3.0, HOME, HOME / 7, commanded=commanded, fault=fault, pace=0.5)
    data = messages.pack(state)
    assert len(data) <= messages.capacity(6)
    read = messages.unpack(data)
    assert (read.time, read.fault, read.pace) == (3.0, fault, 0.5)
    np.testing.assert_array_equal(read.joints, state.joints)
    np.testing.assert_array_equal(read.joint_velocities, state.joint_velocities)
    assert (read.commanded is None) == (commanded is None)
    if commanded is not None:
        assert messages.pack_target(read.commanded) == [1.5] * 6

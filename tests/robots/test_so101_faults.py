"""Faults of the simulated SO-101, as LeRobot's driver meets them, and what an acknowledgement does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rlinf_vla.features.realworld.robot import JointTarget, RobotError, RobotState
from rlinf_vla.robots.lerobot.client import LeRobotRobot
from rlinf_vla.robots.lerobot.plugin import so101_sim
from rlinf_vla.robots.so101_sim.client import SimulatedSO101
from tests.robots.so101 import require_twin, twin

require_twin()
pytestmark = [pytest.mark.simulator, pytest.mark.realtime, pytest.mark.nightly]


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LeRobotRobot]:
    with closing(so101_sim.make(twin(tmp_path_factory.mktemp("arm"), cameras=[]))) as made:
        made.connect(90.0)
        yield made


@pytest.fixture
def cell(robot: LeRobotRobot) -> SimulatedSO101:
    return SimulatedSO101(Path(robot.options(1.0)["folder"]))


def until(
    robot: LeRobotRobot, condition: Callable[[RobotState], bool], seconds: float = 20.0
) -> RobotState:
    deadline = time.monotonic() + seconds
    while not condition(state := robot.observe()):
        assert time.monotonic() < deadline, state
        time.sleep(0.02)
    return state


def push(robot: LeRobotRobot, joint: int, step: float, seconds: float) -> None:
    """Move a joint on and on, as a policy does, until a fault."""
    end = time.monotonic() + seconds
    target = robot.observe().joints.copy()
    while time.monotonic() < end and robot.observe().fault is None:
        target = target + step * np.eye(len(target))[joint]
        try:
            robot.command(JointTarget(target), time.monotonic() + 0.25)
        except RobotError:
            return
        time.sleep(0.1)


def acknowledged(robot: LeRobotRobot) -> None:
    robot.acknowledge("Ada")
    until(robot, lambda state: state.fault is None, 60.0)


def test_the_joints_are_those_of_the_simulation(robot: LeRobotRobot, cell: SimulatedSO101) -> None:
    robot.home(60.0)
    measured, truth = robot.observe().joints, cell.truth().joints_deg
    np.testing.assert_allclose(measured[:5], truth[:5], atol=0.5)
    assert measured[5] == pytest.approx((truth[5] + 10) / 110 * 100, abs=1)
    np.testing.assert_allclose(measured[:5], robot.cell.home[:5], atol=3)


def test_a_blocked_joint_is_named_and_the_arm_stands(
    robot: LeRobotRobot, cell: SimulatedSO101
) -> None:
    robot.home(60.0)
    cell.fault("blocked")
    push(robot, 2, -5.0, 4.0)
    fault = until(robot, lambda state: state.fault is not None).fault
    cell.fix("blocked")
    assert fault is not None and "max_deviation: elbow_flex" in fault
    with pytest.raises(RobotError, match="max_deviation"):
        robot.home(10.0)
    acknowledged(robot)
    robot.home(60.0)


def test_an_interrupted_bus_is_a_fault_and_an_acknowledgement_connects_again(
    robot: LeRobotRobot, cell: SimulatedSO101
) -> None:
    robot.home(60.0)
    before = cell.truth().joints_deg
    cell.fault("silent")
    fault = until(robot, lambda state: state.fault is not None, 30.0).fault
    cell.fix("silent")
    assert fault is not None and fault.startswith("network: ")
    np.testing.assert_allclose(cell.truth().joints_deg, before, atol=1.0, err_msg="the motors hold")
    acknowledged(robot)
    robot.home(60.0)

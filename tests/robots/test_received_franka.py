"""What the simulated arm receives at 1 kHz from the real franky, against the limits of the FR3 (its URDF, and Franka's data sheet)."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from franka_session import CELL_YAML, wait_until
from test_joint_limits import model

from rlinf_vla.core.child_process import Child
from rlinf_vla.features.realworld.robot import ToolPose, ToolTarget
from rlinf_vla.robots import kinematics
from rlinf_vla.robots.franka.plugin import franka_sim
from tests.skips import NOT_INSTALLED

pytest.importorskip("franky_sim", reason=NOT_INSTALLED + "franka")

from recording_cell import NUMBERS, RECEIVED

pytestmark = [pytest.mark.simulator, pytest.mark.realtime]
TORQUE_RATE, JOINT_ACCELERATION, JOINT_JERK = 1000.0, 10.0, 5000.0
"""N m/s, rad/s^2 and rad/s^3 of every joint: Franka Research 3, robot limits."""
HZ = 1000.0
SQUARE = [(1, 0, -1), (0, 1, 0), (-1, 0, 1), (0, -1, 0)]


@pytest.fixture(scope="module")
def received(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """An arm that goes round a square at full speed, stops, and goes home."""
    folder = tmp_path_factory.mktemp("recorded")
    child = Child([str(Path(__file__).parent / "recording_cell.py")])
    child.channel.send({"folder": str(folder)})
    assert child.channel.receive(120) == {"ready": True}, child.output_tail()
    limits = folder / "patient.yaml"
    limits.write_text(CELL_YAML)
    robot = franka_sim.make(franka_sim.Config(folder=str(folder), cell=str(limits), cameras=[]))
    try:
        robot.connect(30)
        state = robot.observe()
        position = state.pose.position.copy()
        for step in range(48):
            position = position + 0.02 * np.array(SQUARE[step // 12]) / np.linalg.norm(
                SQUARE[step // 12]
            )
            robot.command(
                ToolTarget(ToolPose(position, state.pose.quaternion)), time.monotonic() + 0.25
            )
            time.sleep(0.1)
            assert robot.observe().fault is None
        wait_until(lambda: robot.observe().commanded is None, 10, "the arm is at rest")
        robot.home(30)
    finally:
        robot.close()
        child.end(3.0)
    return np.frombuffer((folder / RECEIVED).read_bytes()).reshape(-1, NUMBERS)


def motions(received: np.ndarray, kind: float) -> list[np.ndarray]:
    """Commands of each motion in torques (1) or positions (0)."""
    of_kind = received[received[:, 1] == kind]
    return [of_kind[of_kind[:, 0] == number][:, 2:9] for number in np.unique(of_kind[:, 0])]


def test_torques_are_within_limits_and_change_slowly(received: np.ndarray) -> None:
    found = motions(received, 1.0)
    assert sum(map(len, found)) > 2000
    for torques in found:
        assert (np.abs(torques) <= model().effortLimit[:7]).all()
        assert np.abs(np.diff(torques, axis=0)).max() * HZ <= TORQUE_RATE + 1e-6
        assert np.abs(torques[0]).max() * HZ <= TORQUE_RATE, "it begins from no torque"


def test_homing_is_within_limits(received: np.ndarray) -> None:
    found = motions(received, 0.0)
    assert max(map(len, found)) > 200
    for positions in found:
        speeds = np.diff(positions, axis=0) * HZ
        accelerations = np.diff(speeds, axis=0) * HZ
        assert np.abs(speeds).max() <= 1.01 * 0.3, "home_speed_rad_s"
        assert np.abs(accelerations).max() <= JOINT_ACCELERATION
        assert np.abs(np.diff(accelerations, axis=0)).max() * HZ <= JOINT_JERK


def test_no_joint_is_faster_than_its_position_allows(received: np.ndarray) -> None:
    joints, speeds = received[:, 9:16], received[:, 16:23]
    assert np.abs(speeds).max() > 0.2
    for joint in range(7):
        allowed = np.array(
            [
                kinematics.fastest(joint, at, speed)
                for at, speed in zip(joints[:, joint], speeds[:, joint], strict=True)
            ]
        )
        assert (np.abs(speeds[:, joint]) <= allowed).all(), joint

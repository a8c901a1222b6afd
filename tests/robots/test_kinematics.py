"""Compared with MuJoCo's FR3 (franky-sim's model, evaluated once) and with finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.core import rotations
from rlinf_vla.robots import kinematics

HAND = kinematics.FrankaKinematics(
    (0, 0, 0.1034), (math.cos(math.pi / 8), 0, 0, -math.sin(math.pi / 8))
)
READY = np.array([0, -np.pi / 4, 0, -3 * np.pi / 4, 0, np.pi / 2, np.pi / 4])
MUJOCO = [
    (READY, [0.306890567, 0.0, 0.486882052], [0.0, 1.0, 0.0, 0.0]),
    (
        np.array([0.3, -0.4, 0.2, -1.9, 0.5, 1.7, -0.6]),
        [0.352132788, 0.315107748, 0.589616916],
        [-0.148122183, 0.581564023, 0.780411591, 0.175501721],
    ),
    (
        np.array([-1.2, 0.9, 1.1, -2.4, -1.5, 3.0, 2.0]),
        [0.509955889, 0.124516356, 0.131455885],
        [-0.26691078, 0.944388559, -0.061197717, 0.182054182],
    ),
]
all_joints = st.tuples(
    *(st.floats(low, high) for low, high in zip(kinematics.LOWER, kinematics.UPPER, strict=True))
).map(np.array)


@pytest.mark.parametrize(("joints", "position", "quaternion"), MUJOCO)
def test_the_pose_of_the_tool_equals_mujocos(
    joints: np.ndarray, position: list[float], quaternion: list[float]
) -> None:
    pose = HAND.pose(joints)
    assert pose.position == pytest.approx(position, abs=1e-8)
    assert abs(float(pose.quaternion @ quaternion)) == pytest.approx(1, abs=1e-8)


@given(all_joints)
def test_the_jacobian_is_the_derivative_of_the_pose(joints: np.ndarray) -> None:
    jacobian = HAND.jacobian(joints)
    small = 1e-6
    for joint, step in enumerate(small * np.eye(7)):
        before = HAND.pose(joints - step)
        after = HAND.pose(joints + step)
        turn = rotations.to_vector(
            rotations.multiply(
                after.quaternion.tolist(), rotations.inverse(before.quaternion.tolist())
            )
        )
        found = np.array([*(after.position - before.position), *turn]) / (2 * small)
        assert jacobian[:, joint] == pytest.approx(found, abs=1e-6)


@given(st.lists(st.floats(-0.05, 0.05), min_size=7, max_size=7))
def test_a_pose_nearby_is_reached(moves: list[float]) -> None:
    wanted = HAND.pose(READY + moves)
    joints = HAND.reach(READY, wanted, 1e-6, 20)
    assert joints is not None
    reached = HAND.pose(joints)
    assert reached.position == pytest.approx(wanted.position, abs=1e-5)
    assert abs(float(reached.quaternion @ wanted.quaternion)) == pytest.approx(1, abs=1e-9)
    assert np.abs(joints - READY).max() < 0.5


def test_an_unreachable_pose_has_no_solution() -> None:
    far = HAND.pose(READY)
    far.position[0] = 1.2
    assert HAND.reach(READY, far, 1e-4, 20) is None


def test_without_a_tool_it_is_the_flange() -> None:
    flange = kinematics.FrankaKinematics((0, 0, 0), (1, 0, 0, 0)).pose(READY)
    assert flange.position == pytest.approx([0.306890567, 0, 0.486882052 + 0.1034], abs=1e-8)

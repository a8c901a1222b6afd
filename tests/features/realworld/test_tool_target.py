from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.features.realworld.action_space import JointSpace, ToolSpace
from rlinf_vla.features.realworld.robot import (
    RobotSpec,
    RobotState,
    ToolPose,
    ToolState,
    ToolTarget,
)
from rlinf_vla.features.realworld.tool_target import (
    TrackedJoints,
    TrackedTool,
    lead,
    limited,
    turned,
)

SPEC = RobotSpec(
    "toy", 10.0, 1.0, ToolSpace(translation_m=0.05, rotation_rad=0.25, gripper_width_m=0.08)
)


class Tracked(TrackedTool):
    """Of an arm of which only the pose matters."""

    def __init__(self, spec: RobotSpec) -> None:
        super().__init__(spec, spec.space)

    def move(self, action: np.ndarray, measured: ToolPose) -> ToolTarget:
        return super().move(
            action, ToolState(0.0, np.zeros(7), np.zeros(7), measured, np.zeros(6), 0.08)
        )


REST = ToolPose(np.array([0.4, 0.0, 0.3]), np.array([0.0, 1.0, 0.0, 0.0]))
unit = st.floats(-1, 1)
vectors = st.tuples(unit, unit, unit).map(np.array)


def action(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def matrix(q: np.ndarray) -> np.ndarray:
    """The rotation of a quaternion, by its textbook formula."""
    w, x, y, z = q
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


@given(vectors, vectors)
def test_rotations_are_about_the_bases_axes(first: np.ndarray, second: np.ndarray) -> None:
    q = turned(np.array([1.0, 0, 0, 0]), first)
    angle = float(np.linalg.norm(second))
    x, y, z = second / angle if angle else second
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    rodrigues = np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross
    np.testing.assert_allclose(matrix(turned(q, second)), rodrigues @ matrix(q), atol=1e-9)


@given(vectors)
def test_the_rotation_vector_inverts_the_rotation(vector: np.ndarray) -> None:
    q = turned(np.array([1.0, 0, 0, 0]), 3 * vector)
    found = lead(-q, np.array([1.0, 0, 0, 0]))
    assert np.linalg.norm(found) <= np.pi + 1e-9
    np.testing.assert_allclose(
        matrix(turned(np.array([1.0, 0, 0, 0]), found)), matrix(q), atol=1e-9
    )


def test_actions_accumulate_on_the_target_for_any_lag() -> None:
    tracked = Tracked(SPEC)
    for count in range(1, 6):
        target = tracked.move(action(0.8, -0.4, 0, 1), REST)
        np.testing.assert_allclose(
            target.pose.position, REST.position + count * np.array([0.04, -0.02, 0])
        )
        np.testing.assert_allclose(target.pose.quaternion, REST.quaternion)
        assert target.gripper_width == 0.08


def test_seven_numbers_also_rotate_and_the_gripper_closes() -> None:
    tracked = Tracked(SPEC)
    for count in (1, 2):
        target = tracked.move(action(0, 0, 0, 0, 0, 1, -1), REST)
        turn = lead(target.pose.quaternion, REST.quaternion)
        np.testing.assert_allclose(turn, [0, 0, 0.25 * count], atol=1e-9)
        assert target.gripper_width == 0


@given(
    st.lists(st.tuples(*[st.floats(-100, 100)] * 7), min_size=1, max_size=20), st.floats(0.1, 0.4)
)
def test_the_lead_of_the_target_is_limited_and_it_reverses_at_once(
    actions: list[tuple[float, ...]], lag: float
) -> None:
    """For an arm that does not move."""
    tracked = Tracked(replace(SPEC, lag_s=lag))
    most = 10 * lag
    for each in actions:
        target = tracked.move(action(*each), REST)
        assert np.linalg.norm(target.pose.position - REST.position) <= most * 0.05 * (1 + 1e-9)
        assert np.linalg.norm(lead(target.pose.quaternion, REST.quaternion)) <= most * 0.25 * (
            1 + 1e-9
        )
        assert np.linalg.norm(target.pose.quaternion) == pytest.approx(1)
        assert target.gripper_width is not None and 0 <= target.gripper_width <= 0.08
    for _ in range(100):
        tracked.move(action(1, 0, 0, 0), REST)
    back = tracked.move(action(-1, 0, 0, 0), REST)
    assert back.pose.position[0] == pytest.approx(REST.position[0] + (most - 1) * 0.05)


@given(st.tuples(*[st.floats(-100, 100)] * 7))
def test_no_action_moves_further_than_a_straight_one(numbers: tuple[float, ...]) -> None:
    target = Tracked(SPEC).move(action(*numbers), REST)
    moved = target.pose.position - REST.position
    clipped = np.clip(numbers, -1, 1)
    assert np.linalg.norm(moved) <= 0.05 * (1 + 1e-9)
    assert np.linalg.norm(np.cross(moved, clipped[:3])) < 1e-6, (
        "in the direction of the clipped action"
    )
    assert np.linalg.norm(lead(target.pose.quaternion, REST.quaternion)) <= 0.25 * (1 + 1e-9)


def test_an_arm_with_the_declared_lag_never_limits_the_target_at_full_speed() -> None:
    tracked = Tracked(replace(SPEC, lag_s=0.3))
    way = []
    for _ in range(10):
        seen = REST if len(way) < 3 else way[-3]
        way.append(tracked.move(action(1, 1, 1, 1), seen).pose)
    np.testing.assert_allclose(way[-1].position, REST.position + 10 * 0.05 / np.sqrt(3))


def test_a_restart_starts_at_the_arms_position() -> None:
    tracked = Tracked(SPEC)
    tracked.move(action(1, 0, 0, 0), REST)
    tracked.restart()
    elsewhere = ToolPose(np.array([0.5, 0.2, 0.1]), np.array([0.0, 0.0, 1.0, 0.0]))
    target = tracked.move(action(0, 0, 1, 0), elsewhere)
    np.testing.assert_allclose(target.pose.position, [0.5, 0.2, 0.15])
    np.testing.assert_allclose(target.pose.quaternion, elsewhere.quaternion)


def test_a_limit_keeps_the_direction() -> None:
    np.testing.assert_allclose(limited(np.array([3.0, 4.0]), 1.0), [0.6, 0.8])
    np.testing.assert_allclose(limited(np.zeros(3), 1.0), 0)


JOINTS = JointSpace(
    ("pan", "lift", "jaw"),
    (-90.0, -45.0, 0.0),
    (90.0, 45.0, 100.0),
    (5.0, 5.0, 20.0),
    ("jaw",),
    True,
)


def measured(*joints: float) -> RobotState:
    return RobotState(0.0, np.array(joints), np.zeros(3))


def test_relative_joint_actions_accumulate_within_lead_and_limits() -> None:
    tracked = TrackedJoints(RobotSpec("toy", 10.0, 0.3, JOINTS), JOINTS)
    at = measured(0, 44, 30)
    for count in range(1, 5):
        found = tracked.move(action(1, 0.5, -1), at).positions
        np.testing.assert_allclose(
            found, [5 * min(count, 3), 45, 0], err_msg="three steps ahead of the arm at most"
        )
    tracked.restart()
    np.testing.assert_allclose(
        tracked.move(action(-1, -0.2, 1), measured(10, 0, 0)).positions, [5, -1, 100]
    )


def test_absolute_joint_actions_are_the_targets_themselves() -> None:
    space = replace(JOINTS, relative=False)
    found = TrackedJoints(RobotSpec("toy", 10.0, 0.3, space), space).move(
        action(80, -40, 55), measured(0, 0, 0)
    )
    np.testing.assert_allclose(found.positions, [80, -40, 55])


@pytest.mark.parametrize("relative", [True, False])
def test_what_a_joint_action_can_be(relative: bool) -> None:
    space = replace(JOINTS, relative=relative)
    assert (
        space.accepts(action(0, 1, -1))
        and not space.accepts(action(0, np.nan, 0))
        and not space.accepts(action(0, np.inf, 0))
    )
    assert space.accepts(action(90, 45, 100)) is not relative
    assert not space.accepts(action(1e3, 0, 0))


def test_to_hold_keeps_joints_and_grippers() -> None:
    joints = np.array([10.0, 20.0, 30.0])
    np.testing.assert_array_equal(JOINTS.hold(3, action(1, 1, -1), joints), [0, 0, -1])
    np.testing.assert_array_equal(JOINTS.hold(3, None, joints), [0, 0, 1])
    absolute = replace(JOINTS, relative=False)
    np.testing.assert_array_equal(absolute.hold(3, action(1, 2, 3), joints), [1, 2, 3])
    np.testing.assert_array_equal(absolute.hold(3, None, joints), joints)
    np.testing.assert_array_equal(SPEC.space.hold(4, action(1, 1, 1, -1), joints), [0, 0, 0, -1])

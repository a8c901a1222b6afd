"""Accelerations of an ideal follower's joints, computed with Pinocchio from the FR3's URDF: the filter's own kinematics take no part."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from obedient import CELL
from test_joint_limits import model

from rlinf_vla.benchmarks import robot_safety_trials as trials
from rlinf_vla.core import rotations
from rlinf_vla.features.realworld.robot import ToolTarget
from rlinf_vla.robots import joint_accelerations
from rlinf_vla.robots.admission import SINGULAR
from rlinf_vla.robots.cell import Cell
from rlinf_vla.robots.safety import SafetyFilter
from tests.skips import needs

pytestmark = needs("franka")
LIMIT = 10.0
"""Of every joint, rad/s^2: Franka's data sheet of the Research 3."""

Goals = Iterator[tuple[ToolTarget | None, int]]


def followed(cell: Cell, commands: np.ndarray) -> np.ndarray:
    """Joints ``[N, 7]`` that reach each command ``[N, 7]`` exactly, by the smallest motion from the one before."""
    import pinocchio

    arm = model()
    data = model().createData()
    position = np.array(cell.tool_position_m) + np.array([0, 0, 0.107])
    tool = pinocchio.SE3(rotations.matrix(rotations.unit(cell.tool_quaternion_wxyz)), position)
    q = np.concatenate([cell.home_joints_rad, np.zeros(arm.nq - 7)])
    path = []
    for command in commands:
        axes = rotations.matrix(command[3:].tolist())
        for _ in range(30):
            pinocchio.computeJointJacobians(arm, data, q)
            at = data.oMi[7] * tool
            error = np.concatenate(
                [command[:3] - at.translation, pinocchio.log3(axes @ at.rotation.T)]
            )
            if np.abs(error).max() < 1e-10:
                break
            moved = pinocchio.getJointJacobian(arm, data, 7, pinocchio.WORLD)[:, :7]
            moved = np.concatenate(
                [moved[:3] - pinocchio.skew(at.translation) @ moved[3:], moved[3:]]
            )
            q[:7] += np.linalg.pinv(moved) @ error
        assert np.abs(error).max() < 1e-10
        path.append(q[:7].copy())
    return np.array(path)


def accelerations(cell: Cell, sent: Goals, filter_: SafetyFilter) -> np.ndarray:
    """The largest of the joints' at each tick, rad/s^2, from finite differences; the last goal is to stop."""
    played = trials.run_trial(cell, filter_, sent)
    assert played.fault is None
    found: np.ndarray = (
        np.abs(np.diff(followed(cell, played.commands), 2, axis=0)).max(axis=1) * cell.servo_hz**2
    )
    return found


def hostile(cell: Cell, filter_: SafetyFilter, draw: np.random.Generator, held: bool) -> Goals:
    """Every kind of goal, and stops in between: for a control period each, or for 1 to 4 ticks."""
    for goal, _ in zip(
        trials.goals(draw, cell, lambda: filter_.admitted), range(200), strict=False
    ):
        yield (
            (goal if draw.random() < 0.9 else None),
            cell.ticks_per_step if held else int(draw.integers(1, 5)),
        )
    yield None, cell.windows.length + 1


@pytest.mark.parametrize("held", [True, False], ids=["one each control period", "faster"])
@pytest.mark.parametrize("cell", [CELL, trials.roomy(CELL)], ids=["shipped", "roomy"])
def test_no_joint_of_an_ideal_follower_accelerates_more_than_the_arm_may(
    cell: Cell, held: bool
) -> None:
    filter_ = SafetyFilter(cell)
    found = np.concatenate(
        [
            accelerations(cell, hostile(cell, filter_, np.random.default_rng(seed), held), filter_)
            for seed in range(3)
        ]
    )
    assert filter_.counts["joint_acceleration"] > 50
    assert 0.8 * LIMIT < found.max() <= LIMIT


def test_without_the_limit_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_accelerations, "SHARE", 1e6)
    filter_ = SafetyFilter(CELL)
    found = np.concatenate(
        [
            accelerations(CELL, hostile(CELL, filter_, np.random.default_rng(seed), True), filter_)
            for seed in (1, 2)
        ]
    )
    assert filter_.counts["joint_acceleration"] == 0
    assert (found > LIMIT).mean() > 0.01 and found.max() > 1.2 * LIMIT


@pytest.mark.parametrize("axis", range(6))
@pytest.mark.parametrize("sign", [-1, 1])
def test_full_actions_in_one_direction_are_no_intervention(axis: int, sign: int) -> None:
    """From rest at home, and to rest."""
    cell = trials.roomy(CELL)  # home is near a wall of the shipped one
    filter_ = SafetyFilter(cell)
    follower = trials.Follower(cell)
    filter_.start(follower.state())
    step = (
        sign * np.eye(6)[axis] * np.repeat([cell.action_translation_m, cell.action_rotation_rad], 3)
    )
    for _ in range(4):
        goal = trials.moved(filter_.admitted, step[:3], step[3:])
        for _ in range(cell.ticks_per_step):
            filtered = filter_.step(goal, follower.state(), 1 / cell.servo_hz)
            assert filtered.interventions == [] and filtered.fault is None
            follower.follow(filtered.command)


def test_a_turn_to_and_fro_is_shortened_and_the_limit_is_used() -> None:
    filter_ = SafetyFilter(CELL)

    def sent() -> Goals:
        for number in range(12):
            turn = CELL.action_rotation_rad * (-1) ** number
            yield (
                trials.moved(filter_.admitted, np.zeros(3), np.array([0, 0, turn])),
                CELL.ticks_per_step,
            )
        yield None, CELL.windows.length + 1

    found = accelerations(CELL, sent(), filter_)
    assert set(filter_.counts) == {"joint_acceleration"}
    assert 0.8 * LIMIT < found.max() <= LIMIT


def test_a_goal_at_a_singularity_is_not_reached() -> None:
    """Straight ahead and up, until the elbow is stretched; then it may come back."""
    cell = trials.roomy(CELL)
    filter_ = SafetyFilter(cell)
    follower = trials.Follower(cell)
    filter_.start(follower.state())
    step = np.array([0.015, 0, 0.005])
    for forth in (1, -1):
        begun = filter_.admitted.pose.position
        for _ in range(40):
            goal = trials.moved(filter_.admitted, forth * step, np.zeros(3))
            for _ in range(cell.ticks_per_step):
                follower.follow(filter_.step(goal, follower.state(), 1 / cell.servo_hz).command)
            assert np.linalg.svd(cell.arm.jacobian(follower.joints))[1][-1] > 0.9 * SINGULAR
        if forth == 1:
            assert filter_.counts["singularity"] > 0
    assert np.linalg.norm(filter_.admitted.pose.position - begun) > 0.2

"""Limits of the safety filter that only consecutive goals, a blocked arm or slow joints reach."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from rlinf_vla.benchmarks import robot_safety_trials as safety_trials
from rlinf_vla.benchmarks.robot_safety_trials import Follower
from rlinf_vla.core import rotations
from rlinf_vla.features.realworld.robot import RobotError, ToolPose, ToolTarget
from rlinf_vla.robots import cell_file
from rlinf_vla.robots.cell import Cell
from rlinf_vla.robots.command_gate import CommandGate
from rlinf_vla.robots.safety import SafetyFilter

CELL = dataclasses.replace(
    cell_file.load(cell_file.CELLS / "franka_sim.yaml", Cell), servo_hz=100.0
)
TICK = 1 / CELL.servo_hz


def away(
    step: tuple[float, float, float] = (0, 0, 0), turn: tuple[float, float, float] = (0, 0, 0)
) -> ToolTarget:
    quaternion = rotations.multiply(rotations.from_vector(turn), CELL.home.quaternion.tolist())
    return ToolTarget(ToolPose(CELL.home.position + step, np.array(quaternion)))


def test_consecutive_full_steps_are_one_uniform_motion() -> None:
    """The reference moves at the speed of full steps, which the command reaches and keeps exactly."""
    cell = dataclasses.replace(CELL, max_translation_per_second_m=0.3, max_lead_m=0.2)
    filter_, follower = SafetyFilter(cell), Follower(cell)
    filter_.start(follower.state())
    positions = []
    for number in range(1, 9):
        goal = away((0, cell.step_m * number, 0))
        for _ in range(cell.ticks_per_step):
            filtered = filter_.step(goal, follower.state(), TICK)
            assert filtered.fault is None and not filtered.interventions
            follower.follow(filtered.command)
            positions.append(filtered.command.pose.position)
    speeds = np.linalg.norm(np.diff(np.array(positions), axis=0), axis=1) * cell.servo_hz
    at_speed = speeds[cell.windows.length :]
    assert len(at_speed) > 20
    assert at_speed == pytest.approx(np.full(len(at_speed), cell.step_m * cell.control_hz))


def test_the_path_length_of_any_second_stays_within_its_limit() -> None:
    """Back and forth at the limits for four seconds: the path of the reference, summed over each second."""
    cell = dataclasses.replace(CELL, max_translation_per_second_m=0.1)
    filter_, follower = SafetyFilter(cell), Follower(cell)
    filter_.start(follower.state())
    ends = [filter_.admitted.pose.position]
    for number in range(40):
        goal = away(((-1) ** number * 0.006, 0, 0))
        for _ in range(cell.ticks_per_step):
            filtered = filter_.step(goal, follower.state(), TICK)
            assert filtered.fault is None
            follower.follow(filtered.command)
        ends.append(filter_.admitted.pose.position)
    ways = np.linalg.norm(np.diff(np.array(ends), axis=0), axis=1)
    seconds = np.convolve(ways, np.ones(round(cell.control_hz)), "valid")
    assert seconds.max() <= cell.max_translation_per_second_m + 1e-9
    assert seconds.max() >= 0.99 * cell.max_translation_per_second_m, (
        "and the full limit may be used"
    )


def test_a_blocked_arm_is_not_rotated_further_than_the_lead() -> None:
    cell = dataclasses.replace(CELL, max_rotation_per_second_rad=2.0, max_lead_rad=0.3)
    filter_ = SafetyFilter(cell)
    held = Follower(cell).state()
    filter_.start(held)
    turned = 0.0
    for number in range(1, 12):
        goal = away(turn=(0, 0, 0.09 * number))
        for _ in range(cell.ticks_per_step):
            command = filter_.step(goal, held, TICK).command
            away_from = rotations.multiply(
                command.pose.quaternion.tolist(), rotations.inverse(held.pose.quaternion.tolist())
            )
            turned = max(turned, math.hypot(*rotations.to_vector(away_from)))
    assert filter_.counts["max_lead_rad"] > 0
    assert 0.29 < turned <= cell.max_lead_rad + 1e-6


def test_joints_stay_within_their_speed_limits() -> None:
    cell = dataclasses.replace(CELL, max_joint_speed_rad_s=0.1)
    filter_, follower = SafetyFilter(cell), Follower(cell)
    filter_.start(follower.state())
    before = follower.joints
    for number in range(1, 6):
        goal = away((0, 0.02 * number, 0))
        begun = follower.joints
        for _ in range(cell.ticks_per_step):
            follower.follow(filter_.step(goal, follower.state(), TICK).command)
        fastest = np.abs(follower.joints - begun).max() * cell.control_hz
        assert fastest <= 1.05 * cell.max_joint_speed_rad_s
    assert filter_.counts["max_joint_speed_rad_s"] >= 4
    assert np.abs(follower.joints - before).max() > 0.01, "it gets there slowly"


@pytest.mark.parametrize("speed", [0.2, -0.2])
def test_it_does_not_start_while_any_joint_moves(speed: float) -> None:
    state = dataclasses.replace(Follower(CELL).state(), joint_velocities=speed * np.eye(7)[3])
    with pytest.raises(RobotError, match="the arm is moving; wait until it stands"):
        SafetyFilter(CELL).start(state)


def test_a_joint_within_its_margin_may_leave_it() -> None:
    """An arm that was guided by hand close to a joint limit, beyond the margin but not beyond its half."""
    cell = safety_trials.roomy(CELL)
    follower = Follower(cell)
    follower.joints = np.array(cell.home_joints_rad)
    follower.joints[6] = 3.0159 - 0.7 * cell.joint_margin_rad
    pose = cell.arm.pose(follower.joints)
    state = dataclasses.replace(follower.state(), pose=pose)
    filter_ = SafetyFilter(cell)
    filter_.start(state)
    back = cell.arm.pose(follower.joints - 0.05 * np.eye(7)[6])
    for _ in range(cell.ticks_per_step + cell.windows.length):
        filtered = filter_.step(ToolTarget(back), state, TICK)
        assert filtered.fault is None
    assert (
        abs(filtered.command.pose.quaternion @ back.quaternion)
        > abs(pose.quaternion @ back.quaternion) + 1e-5
    ), "it may move back"
    out = cell.arm.pose(follower.joints + 0.03 * np.eye(7)[6])
    filter_.start(state)
    for _ in range(cell.ticks_per_step + cell.windows.length):
        filtered = filter_.step(ToolTarget(out), state, TICK)
    assert filter_.counts["joint_margin_rad"] > 0
    assert abs(filtered.command.pose.quaternion @ pose.quaternion) == pytest.approx(1, abs=1e-6), (
        "it may not move further out"
    )


@pytest.mark.parametrize("stopped_by", ["no goal", "a force"])
def test_stop_ends_the_path_at_its_position_and_not_at_the_goal(stopped_by: str) -> None:
    """After three of ten ticks towards a goal, three tenths of the path are done, and it stops there."""
    filter_, follower = SafetyFilter(CELL), Follower(CELL)
    filter_.start(follower.state())
    goal = away((0.02, 0, 0))
    for _ in range(3):
        follower.follow(filter_.step(goal, follower.state(), TICK).command)
    for _ in range(CELL.windows.length + 12):
        state = follower.state(np.array([0, 0, 99.0, 0, 0, 0]) if stopped_by == "a force" else None)
        filtered = filter_.step(None if stopped_by == "no goal" else goal, state, TICK)
        follower.follow(filtered.command)
    assert filtered.command.pose.position - CELL.home.position == pytest.approx(
        [0.3 * 0.02, 0, 0], abs=1e-9
    )
    assert (filtered.fault is None) == (stopped_by == "no goal")


def test_a_rest_does_not_reset_the_gates_path_limit_per_second() -> None:
    """Moves for nearly the full limit; after a rest of the filter the same second continues."""
    cell = dataclasses.replace(CELL, max_translation_per_second_m=0.12)
    gate = CommandGate(cell)
    gate.rest(away())
    gone = 0.0
    tick = 0
    most = cell.max_speed_m_s
    problem = None
    while gone < 0.9 * cell.max_translation_per_second_m:
        tick += 1
        gone += (
            0.999 * most * min(1.0, (1 - math.cos(math.pi * min(tick / 40, 1))) / 2) / cell.servo_hz
        )
        problem = gate.check(away((0, gone, 0)))
        assert problem is None
    gate.rest(away((0, gone, 0)))
    begun = gone
    tick = 0
    while problem is None and tick < 30:
        tick += 1
        gone += 0.999 * most * (1 - math.cos(math.pi * tick / 40)) / 2 / cell.servo_hz
        problem = gate.check(away((0, gone, 0)))
    assert problem is not None and problem.startswith("max_translation_per_second_m")
    assert gone - begun < 0.15 * cell.max_translation_per_second_m

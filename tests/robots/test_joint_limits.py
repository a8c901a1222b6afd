"""Limits of the joints, computed again with Pinocchio from the FR3's URDF, which franky-sim contains (and libfranka reads from the arm)."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from obedient import CELL

from rlinf_vla.benchmarks import robot_safety_trials as safety_trials
from rlinf_vla.benchmarks.robot_safety_trials import Follower
from rlinf_vla.features.realworld.robot import ToolPose, ToolTarget
from rlinf_vla.robots import kinematics
from rlinf_vla.robots.admission import OWN_SHARE
from rlinf_vla.robots.franka.reflexes import MARGIN, joint_thresholds
from rlinf_vla.robots.safety import SafetyFilter
from tests.skips import needs

pytestmark = needs("franka")
JOINTS = range(7)


def urdf() -> Path:
    import franky_sim

    return Path(franky_sim.__file__).parent / "assets/fr3.urdf"


@cache
def model() -> Any:
    import pinocchio

    return pinocchio.buildModelFromUrdf(str(urdf()))


def torques(joints: np.ndarray, force: np.ndarray) -> np.ndarray:
    """Of the joints, N m ``[7]``, that hold a force (N ``[3]``) at the cell's tool."""
    import pinocchio

    arm = model()
    data = model().createData()
    q = np.concatenate([joints, np.zeros(arm.nq - 7)])
    pinocchio.forwardKinematics(arm, data, q)
    flange = data.oMi[7] * pinocchio.SE3(np.eye(3), np.array([0.0, 0.0, 0.107]))
    tool = flange.act(np.array(CELL.tool_position_m))
    jacobian = pinocchio.computeJointJacobians(arm, data, q)[:, :7]
    moment = np.cross(tool, force)  # about the base's origin
    return np.array(jacobian.T @ np.concatenate([force, moment]))


def configurations() -> list[np.ndarray]:
    return list(np.random.default_rng(0).uniform(kinematics.LOWER, kinematics.UPPER, (300, 7)))


def test_each_joints_threshold_can_be_reached_by_its_motor() -> None:
    effort = model().effortLimit[:7]
    np.testing.assert_array_equal(kinematics.TORQUE_N_M, effort)
    for force in (5.0, 40.0, 100.0):
        thresholds = joint_thresholds(dataclasses.replace(CELL, max_force_n=force))
        assert all(threshold >= 10 or index >= 4 for index, threshold in enumerate(thresholds))
        assert (np.array(thresholds) < 0.9 * effort).all() and min(thresholds) > 5


def test_a_force_within_the_limit_causes_no_reflex() -> None:
    """In any configuration and direction; the stop by ``max_force_n`` is the gentler one."""
    draw = np.random.default_rng(1)
    thresholds = np.array(joint_thresholds(CELL))
    worst = np.zeros(7)
    for joints in configurations():
        direction = draw.normal(size=3)
        force = CELL.max_force_n * direction / np.linalg.norm(direction)
        found = np.abs(torques(joints, force))
        worst = np.maximum(worst, found)
        assert (
            found
            <= np.array(kinematics.levers(np.linalg.norm(CELL.tool_position_m))) * CELL.max_force_n
            + 1e-9
        ).all()
    assert (worst < thresholds).all() and (worst[:6] > 0.3 * thresholds[:6]).all()
    assert thresholds[0] > MARGIN * CELL.max_force_n * 0.9


def position_based(limit: ET.Element, extra: ET.Element, at: float, sign: int) -> float:
    """libfranka's formula (joint_velocity_limits.h)."""
    end = float(limit.attrib["upper" if sign > 0 else "lower"])
    left = max(0.0, 2 * float(extra.attrib["deceleration_limit"]) * abs(end - at))
    return min(
        float(limit.attrib["velocity"]),
        max(0.0, -float(extra.attrib["velocity_offset"]) + left**0.5),
    )


@pytest.mark.parametrize("joint", JOINTS)
def test_no_joint_may_be_faster_than_the_arm_allows_at_its_position(joint: int) -> None:
    (found,) = [
        each
        for each in ET.parse(urdf()).iter("joint")
        if each.get("name") == f"fr3_joint{joint + 1}"
    ]
    limit, extra = found.find("limit"), found.find("position_based_velocity_limits")
    assert limit is not None and extra is not None
    for at in np.linspace(kinematics.LOWER[joint], kinematics.UPPER[joint], 200):
        for sign in (-1, 1):
            ours = kinematics.fastest(joint, float(at), sign)
            theirs = position_based(limit, extra, float(at), sign)
            assert 0 <= OWN_SHARE * ours <= theirs + 0.002, (at, sign)
    middle = (kinematics.LOWER[joint] + kinematics.UPPER[joint]) / 2
    assert kinematics.fastest(joint, middle, 1) > 0.85 * float(limit.attrib["velocity"])


@pytest.mark.parametrize(
    "way", [(1.0, 0.0, 0.5), (0.0, 0.0, 1.0), (-1.0, 0.0, -0.3), (0.3, 1.0, 0.0)]
)
def test_no_joint_of_an_ideal_follower_is_faster_than_the_arm_allows_there(
    way: tuple[float, float, float],
) -> None:
    """Straight ahead until the arm is stretched, or folded; speeds are finite differences of the joints at each tick."""
    fast = {
        "max_translation_per_second_m": 1.0,
        "max_translation_per_step_m": 0.1,
        "max_speed_m_s": 1.0,
        "max_lead_m": 0.2,
    }
    cell = dataclasses.replace(
        safety_trials.roomy(CELL), max_joint_speed_rad_s=2.62, joint_margin_rad=0.02, **fast
    )
    follower, filter_ = Follower(cell), SafetyFilter(cell)
    filter_.start(follower.state())
    step = cell.step_m * np.array(way) / np.linalg.norm(way)
    before = follower.joints
    used = np.zeros(7)
    for _ in range(25):
        goal = filter_.admitted.pose
        wanted = ToolTarget(ToolPose(goal.position + step, goal.quaternion))
        for _ in range(cell.ticks_per_step):
            follower.follow(filter_.step(wanted, follower.state(), 1 / cell.servo_hz).command)
            speeds = (follower.joints - before) * cell.servo_hz
            before = follower.joints
            allowed = [
                kinematics.fastest(joint, float(at), speed)
                for joint, (at, speed) in enumerate(zip(before, speeds, strict=True))
            ]
            used = np.maximum(used, np.abs(speeds) / np.maximum(allowed, 1e-3))
    assert filter_.counts["max_joint_speed_rad_s"] > 0
    assert 0.3 < used.max() <= 1.0

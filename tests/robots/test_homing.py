"""The way home: up first, inside the workspace, by forward kinematics."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from obedient import CELL

from rlinf_vla.features.realworld.robot import RobotError, ToolPose
from rlinf_vla.robots.homing import LIFT_M, TOLERANCE_M, way_home
from rlinf_vla.robots.workspace import BOX

BOX_M = np.array([getattr(CELL, key) for key in BOX])
HOME = np.array(CELL.home_joints_rad)


def reached(position: tuple[float, float, float], joints: np.ndarray = HOME) -> np.ndarray:
    """Joints of an arm that moved there in a straight line from its rest position."""
    begin = CELL.arm.pose(joints).position
    for part in np.linspace(0, 1, 30)[1:]:
        found = CELL.arm.reach(
            joints,
            ToolPose(begin + part * (np.array(position) - begin), CELL.home.quaternion),
            1e-5,
            20,
        )
        assert found is not None, position
        joints = found
    return joints


def tools(way: list[np.ndarray]) -> np.ndarray:
    """Positions of the tool on the way."""
    parts = np.linspace(0, 1, 40)
    return np.array(
        [
            CELL.arm.pose(a + part * (b - a)).position
            for a, b in itertools.pairwise(way)
            for part in parts
        ]
    )


CORNERS = [
    (0.6, 0.28, 0.04),
    (0.6, -0.28, 0.04),
    (0.35, 0.28, 0.04),
    (0.6, 0.0, 0.45),
    (0.55, 0.25, 0.45),
    (0.45, 0.0, 0.03),
    (0.4, 0.1, 0.49),
]


@pytest.mark.parametrize("position", CORNERS)
def test_the_tool_rises_first_and_stays_inside(position: tuple[float, float, float]) -> None:
    joints = reached(position)
    way = way_home(CELL, joints)
    np.testing.assert_array_equal(way[-1], HOME)
    seen = tools([joints, *way])
    assert (seen >= BOX_M[:, 0] - TOLERANCE_M - 1e-3).all() and (
        seen <= BOX_M[:, 1] + TOLERANCE_M + 1e-3
    ).all()
    assert seen[:, 2].min() >= min(position[2], CELL.home.position[2]) - TOLERANCE_M
    needed = min(LIFT_M, CELL.home.position[2] - position[2])
    if needed > 0:
        lifted = CELL.arm.pose(way[0]).position
        assert lifted == pytest.approx((*position[:2], lifted[2]), abs=1e-3)
        assert lifted[2] - position[2] >= needed - 1e-3


def test_an_arm_that_is_home_moves_at_most_its_elbow() -> None:
    assert len(way_home(CELL, HOME)) == 1


def test_an_arm_outside_its_workspace_may_come_back_but_go_no_further_out() -> None:
    cell = dataclasses.replace(CELL, workspace_y_m=(-0.1, 0.1))
    joints = reached((0.45, 0.28, 0.2))
    seen = tools([joints, *way_home(cell, joints)])
    assert seen[:, 1].max() <= 0.28 + TOLERANCE_M + 1e-3 and abs(seen[-1, 1]) < 1e-6


def test_a_way_that_leaves_the_workspace_is_refused() -> None:
    """The arm was guided to its back, and every way round is outside the box."""
    joints = reached((0.6, 0.0, 0.4))
    joints[0] = 2.5
    with pytest.raises(
        RobotError,
        match=r"homing: workspace_[xyz]_m: the tool would pass .* outside \[.*\]; guide the arm by hand",
    ) as raised:
        way_home(CELL, joints)
    assert "\n" not in str(raised.value)

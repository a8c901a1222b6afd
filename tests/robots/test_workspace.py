"""The convex set of tool poses, and paths that are cut at a distance, against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.core.rotations import Triple
from rlinf_vla.robots import cell_file
from rlinf_vla.robots.cell import Cell
from rlinf_vla.robots.workspace import Place, Workspace, along, part_within

CELL = cell_file.load(cell_file.CELLS / "franka_sim.yaml", Cell)
SPACE = Workspace(CELL)
INSIDE: Triple = (0.45, 0.0, 0.25)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("upper", [False, True])
def test_each_wall_is_enforced_and_named(axis: int, upper: bool) -> None:
    rule = ("workspace_x_m", "workspace_y_m", "workspace_z_m")[axis]
    wall = getattr(CELL, rule)[upper]
    beyond = wall + (0.07 if upper else -0.07)
    position = tuple(beyond if i == axis else each for i, each in enumerate(INSIDE))
    (found, turn), changes = SPACE.inside((position, (0.0, 0.0, 0.0)))  # type: ignore[arg-type]
    assert found == tuple(
        wall if i == axis else each for i, each in enumerate(INSIDE)
    ) and turn == (0.0, 0.0, 0.0)
    assert changes == {rule: (beyond, wall)}


@pytest.mark.parametrize("sign", [1, -1])
def test_a_twist_either_way_ends_at_its_limit(sign: int) -> None:
    limit = math.radians(CELL.max_twist_deg)
    (_, turn), changes = SPACE.inside((INSIDE, (0.0, 0.0, sign * (limit + 0.2))))
    assert turn == pytest.approx((0, 0, sign * limit))
    assert changes == {
        "max_twist_deg": pytest.approx(
            (sign * math.degrees(limit + 0.2), sign * CELL.max_twist_deg)
        )
    }


@given(st.floats(0, 2 * math.pi), st.floats(0.6, 3.0))
def test_a_tilt_ends_in_its_direction_and_its_cone(direction: float, across: float) -> None:
    """A cylinder of radius 2 sin(tilt / 2) lies inside the cone."""
    (_, turn), changes = SPACE.inside(
        (INSIDE, (across * math.cos(direction), across * math.sin(direction), 0.0))
    )
    radius = 2 * math.sin(math.radians(CELL.max_tilt_deg) / 2)
    assert turn == pytest.approx((radius * math.cos(direction), radius * math.sin(direction), 0.0))
    assert changes.keys() == {"max_tilt_deg"}
    assert 2 * math.sin(math.hypot(*turn) / 2) <= radius + 1e-12, (
        "the angle of that rotation vector is within the limit"
    )


@given(st.lists(st.floats(-1, 1), min_size=6, max_size=6))
def test_a_pose_inside_is_unchanged(numbers: list[float]) -> None:
    x, y, z, *turn = numbers
    place: Place = ((x, y, z), (turn[0], turn[1], turn[2]))
    once, _ = SPACE.inside(place)
    again, changes = SPACE.inside(once)
    assert not changes and again == once


coordinates = st.tuples(*[st.floats(-2, 2)] * 3)


@given(coordinates, coordinates, coordinates, st.floats(0.1, 2))
def test_the_part_of_a_path_within_a_radius_against_brute_force(
    begin: Triple, end: Triple, centre: Triple, radius: float
) -> None:
    """Up to the radius, or completely if the end is nearer than the start."""
    found = part_within(begin, end, centre, radius)
    assert 0 <= found <= 1
    from_begin, from_end = math.dist(begin, centre), math.dist(end, centre)
    if from_end <= from_begin or from_end <= radius:
        assert found == 1
        return
    if from_begin >= radius:
        assert found == 0
        return
    parts = np.linspace(0, 1, 2001)
    kept = [part for part in parts if math.dist(along(begin, end, part), centre) <= radius]
    assert found == pytest.approx(max(kept), abs=6e-4)

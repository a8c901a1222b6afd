from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.core import rotations

numbers = st.floats(-1, 1)
vectors = st.tuples(numbers, numbers, numbers)
quaternions = (
    st.tuples(numbers, numbers, numbers, numbers)
    .filter(lambda q: math.hypot(*q) > 1e-3)
    .map(rotations.unit)
)


def same_rotation(a: rotations.Quaternion, b: rotations.Quaternion) -> bool:
    return abs(sum(x * y for x, y in zip(a, b, strict=True))) == pytest.approx(1, abs=1e-12)


@given(quaternions, quaternions)
def test_products_are_those_of_matrices(a: rotations.Quaternion, b: rotations.Quaternion) -> None:
    assert np.allclose(
        rotations.matrix(rotations.multiply(a, b)),
        rotations.matrix(a) @ rotations.matrix(b),
        atol=1e-12,
    )
    assert same_rotation(rotations.multiply(a, rotations.inverse(a)), rotations.IDENTITY)


@given(quaternions)
def test_quaternion_matrix_and_vector_agree(q: rotations.Quaternion) -> None:
    assert same_rotation(rotations.from_matrix(rotations.matrix(q)), q)
    assert same_rotation(rotations.from_vector(rotations.to_vector(q)), q)
    assert math.hypot(*rotations.to_vector(q)) <= math.pi + 1e-12


@given(quaternions, vectors)
def test_the_nearest_vector_is_the_same_rotation_and_no_other_is_nearer(
    q: rotations.Quaternion, near: rotations.Triple
) -> None:
    near = (6 * near[0], 6 * near[1], 6 * near[2])
    found = rotations.nearest_vector(q, near)
    assert same_rotation(rotations.from_vector(found), q)
    assert math.dist(found, near) <= math.dist(rotations.to_vector(q), near) + 1e-12


@given(vectors, vectors)
def test_between_rotates_one_direction_into_the_other(
    a: rotations.Triple, b: rotations.Triple
) -> None:
    if math.hypot(*a) < 1e-3 or math.hypot(*b) < 1e-3:
        return
    turned = rotations.matrix(rotations.between(a, b)) @ np.array(a) / math.hypot(*a)
    assert np.allclose(turned, np.array(b) / math.hypot(*b), atol=1e-5)


def test_between_opposite_directions_is_half_a_turn() -> None:
    for axis in np.eye(3):
        assert np.allclose(
            rotations.matrix(rotations.between(axis.tolist(), (-axis).tolist())) @ axis, -axis
        )

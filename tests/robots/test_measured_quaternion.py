"""The sign of the measured orientation, which a policy sees: q and -q are one orientation."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from rlinf_vla.core import rotations
from rlinf_vla.features.realworld.robot import Vector
from rlinf_vla.robots.franka.messages import measure, sign_of

DOWN = (0.0, 1.0, 0.0, 0.0)


def turned(reference: rotations.Quaternion, yaw: float) -> rotations.Quaternion:
    return rotations.multiply(rotations.from_vector((0.0, 0.0, yaw)), reference)


def seen(orientation: rotations.Quaternion, near: Vector, flipped: bool) -> Vector:
    """What is measured if the arm gives either of the two quaternions."""
    w, x, y, z = (-each if flipped else each for each in orientation)
    pose = SimpleNamespace(quaternion=np.array([x, y, z, w]), translation=np.zeros(3))
    state = SimpleNamespace(O_T_EE=pose, q=np.zeros(7), dq=np.zeros(7), O_F_ext_hat_K=np.zeros(6))
    return measure(state, 1.0, near).pose.quaternion


@pytest.mark.parametrize(
    "yaw", np.linspace(-np.pi, np.pi, 9), ids=lambda yaw: f"{np.degrees(yaw):.0f} deg"
)
def test_the_sign_is_continuous_and_a_restart_finds_it_again(yaw: float) -> None:
    """Whatever the cell's reference is, the tool turns by 170 degrees to both sides of it, which passes the zero of each component."""
    reference = turned(DOWN, yaw)
    first = near = sign_of(reference)
    for sample, angle in enumerate(np.radians([*range(0, 170, 2), *range(170, -170, -2)])):
        found = seen(turned(reference, float(angle)), near, flipped=bool(sample % 2))
        assert np.abs(found - near).max() < 0.02, "continuous, though the arm's own sign alternates"
        for flipped in (False, True):
            assert np.array_equal(seen(turned(reference, float(angle)), first, flipped), found), (
                "as after a restart here"
            )
        near = found


@pytest.mark.parametrize("yaw", [-2.5, -1.0, 0.0, 1.0, 2.5])
def test_x_is_positive_at_the_reference_as_in_recorded_states(yaw: float) -> None:
    reference = turned(DOWN, yaw)
    for given in (reference, tuple(-each for each in reference)):
        assert sign_of(given)[1] > 0  # type: ignore[arg-type]


def test_rounding_does_not_choose_the_sign() -> None:
    assert sign_of((0.0, 1e-17, 1.0, 0.0))[2] == sign_of((0.0, -1e-17, 1.0, 0.0))[2] == 1.0

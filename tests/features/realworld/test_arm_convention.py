from __future__ import annotations

import numpy as np
import pytest
import torch

from rlinf_vla.core.protocols import Convention
from rlinf_vla.core.rotations import axis_angle
from rlinf_vla.core.types import Observation
from rlinf_vla.features.realworld.arm_convention import ArmConvention


@pytest.mark.parametrize(
    ("gripper", "opens", "closes"),
    [(None, 1, -1), ("open_positive", 1, -1), ("close_positive", -1, 1), ("zero_to_one", 1, 0)],
)
def test_the_gripper_opens_and_closes_as_the_policy_means(
    gripper: str | None, opens: float, closes: float
) -> None:
    convention = ArmConvention(Convention(gripper=gripper))
    asked = np.array([[0.1, -0.2, 0.3, opens], [0.4, 0.5, -0.6, closes]], np.float32)
    arm = convention.to_arm(asked)
    assert arm.dtype == np.float32 and arm[:, -1].tolist() == [1, -1]
    np.testing.assert_array_equal(arm[:, :-1], asked[:, :-1])
    torch.testing.assert_close(convention.to_policy(torch.from_numpy(arm)), torch.from_numpy(asked))


def test_the_state_is_in_the_policys_layout() -> None:
    state = torch.tensor(
        [[0.4, 0.1, 0.3, 0.0, 1.0, 0.0, 0.0, 0.03], [0.5, 0.0, 0.2, 0.6, 0.0, 0.8, 0.0, 0.01]]
    )
    seen = Observation({}, state, ["", ""])
    assert ArmConvention(Convention(state="quaternion")).seen(seen).state is state
    found = ArmConvention(Convention(state="axis_angle")).seen(seen).state
    for row, before in zip(found, state, strict=True):
        torch.testing.assert_close(row[:3], before[:3])
        torch.testing.assert_close(row[3:6], torch.tensor(axis_angle(before[3:7].tolist())))
        assert row[6:].tolist() == [before[7], -before[7]]


def test_the_state_of_joints_is_not_given_the_tool_s() -> None:
    """Both have eight numbers: what the arm offers differs, so that ``check_meaning`` refuses."""
    assert ArmConvention(Convention(state="qpos")).native.state == "quaternion"
    for state in (None, "axis_angle", "quaternion"):
        assert ArmConvention(Convention(state=state)).native.state == state

"""Differential inverse kinematics and rotations, compared with loops; no test needs Genesis."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf_vla.envs.genesis import rotations
from rlinf_vla.envs.genesis.arm import DAMPING, FASTEST_RAD, joint_targets, pose_error


def matrix(q: np.ndarray) -> np.ndarray:
    """The textbook's rotation matrix of a unit quaternion (w, x, y, z)."""
    w, x, y, z = q
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def quaternions(number: int, seed: int) -> Tensor:
    drawn = torch.randn(
        number, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return drawn / drawn.norm(dim=1, keepdim=True)


def test_products_third_axes_and_rotated_vectors_are_those_of_matrices() -> None:
    a = quaternions(20, 0)
    b = quaternions(20, 1)
    vectors = torch.randn(20, 3, dtype=torch.float64)
    product = rotations.product(a, b)
    axes = rotations.third_axes(a)
    turned = rotations.turned(a, vectors)
    for i in range(20):
        left, right = matrix(a[i].numpy()), matrix(b[i].numpy())
        assert np.allclose(matrix(product[i].numpy()), left @ right)
        assert np.allclose(axes[i].numpy(), [left[:, 2], left[2]])
        assert np.allclose(turned[i].numpy(), left @ vectors[i].numpy())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_error_of_a_pose_is_translation_and_rotation(sign: float) -> None:
    """A quaternion and its negative are the same orientation: the error is the shorter rotation."""
    turn = torch.tensor([[0.02, -0.03, 0.01]], dtype=torch.float64)
    now = quaternions(1, 2)
    wanted = sign * rotations.product(rotations.from_vector(turn), now)
    error = pose_error(
        torch.tensor([[0.1, 0.2, 0.3]]), wanted, torch.tensor([[0.0, 0.2, 0.4]]), now
    )
    assert torch.allclose(
        error, torch.cat([torch.tensor([[0.1, 0.0, -0.1]]), turn], dim=1), atol=1e-5
    )


def planar(
    joints: Tensor, lengths: tuple[float, ...] = (0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.05)
) -> tuple[Tensor, Tensor, Tensor]:
    """Seven hinges about z in a chain: their positions and axes ``[N, 7, 3]``, and the end of the last ``[N, 3]``."""
    angles = joints.cumsum(1)
    links = (
        torch.stack([angles.cos(), angles.sin(), torch.zeros_like(angles)], dim=-1)
        * torch.tensor(lengths)[:, None]
    )
    ends = links.cumsum(1)
    anchors = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], dim=1)
    return anchors, torch.tensor([0.0, 0.0, 1.0]).expand_as(anchors), ends[:, -1]


def follow(joints: Tensor, goal: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Joints that move 0.6 of the distance to their targets per step, for the fixed ``goal``; their final state and the point's."""
    targets = joints.clone()
    for _ in range(steps):
        anchors, axes, point = planar(joints)
        turn = torch.zeros(len(joints), 3)
        targets = joint_targets(
            anchors, axes, point, torch.cat([goal - point, turn], dim=1), joints, targets
        )
        joints = joints + 0.6 * (targets - joints)
    return joints, planar(joints)[2]


def test_the_tool_comes_to_rest_at_its_goal() -> None:
    joints = torch.tensor([[0.4, 0.5, 0.3, -0.2, 0.3, 0.2, 0.1]])
    goal = planar(joints)[2] + torch.tensor([[-0.05, 0.06, 0.0]])
    found, end = follow(joints, goal, 40)
    assert (end - goal).norm() < 1e-4
    later, _ = follow(found, goal, 40)
    assert (later - found).abs().max() < 1e-3, "joints that the goal leaves free do not move"


def test_one_step_is_textbook_damped_least_squares() -> None:
    generator = torch.Generator().manual_seed(3)
    anchors, axes, targets, joints = (
        torch.randn(shape, generator=generator) for shape in ((5, 7, 3), (5, 7, 3), (5, 7), (5, 7))
    )
    point = torch.randn(5, 3, generator=generator)
    error = 0.01 * torch.randn(5, 6, generator=generator)
    joints = targets + 0.01 * joints
    found = joint_targets(anchors, axes, point, error, joints, targets).double().numpy()
    for i in range(5):
        columns = [
            np.r_[np.cross(axis, point[i].numpy() - anchor), axis]
            for anchor, axis in zip(anchors[i].numpy(), axes[i].numpy(), strict=True)
        ]
        jacobian = np.stack(columns, axis=1).astype(np.float64)
        rest = error[i].numpy() - jacobian @ (targets[i] - joints[i]).numpy()
        change = jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + DAMPING**2 * np.eye(6), rest)
        assert np.allclose(found[i] - targets[i].numpy(), change, atol=1e-4)


def test_no_joint_jumps() -> None:
    """For a stretched arm, the last millimetre would need an arbitrary angle."""
    joints = torch.full((1, 7), 1e-3)
    anchors, axes, point = planar(joints)
    error = torch.tensor([[0.08, 0.0, 0.0, 0.0, 0.0, 0.0]])
    change = joint_targets(anchors, axes, point, error, joints, joints) - joints
    assert change.abs().max() <= FASTEST_RAD + 1e-6


@pytest.mark.parametrize("number", [1, 2, 3, 7, 20])
def test_a_row_depends_neither_on_the_others_nor_on_its_place(number: int) -> None:
    """Bit for bit, otherwise an episode would depend on others of its batch."""
    generator = torch.Generator().manual_seed(4)
    drawn = [
        torch.randn(number, *shape, generator=generator)
        for shape in ((7, 3), (7, 3), (3,), (6,), (7,), (7,))
    ]
    whole = joint_targets(*drawn)
    order = torch.randperm(number, generator=generator)
    assert torch.equal(joint_targets(*(each[order] for each in drawn)), whole[order])
    for row in range(number):
        assert torch.equal(joint_targets(*(each[row : row + 1] for each in drawn))[0], whole[row])


def test_a_full_turn_is_no_rotation() -> None:
    assert (
        rotations.to_vector(rotations.from_vector(torch.tensor([[0.0, 2 * math.pi, 0.0]])))
        .abs()
        .max()
        < 1e-5
    )

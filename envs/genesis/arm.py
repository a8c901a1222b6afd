"""Batched differential inverse kinematics: joint targets that move the tool to a pose.

One step of damped least squares per control step, from the present posture (Buss, "Introduction to
inverse kinematics with Jacobian transpose, pseudoinverse and damped least squares methods", 2004).
The next control step corrects the residual, so the tool comes to rest exactly at its target.
Genesis' own solver iterates to convergence and takes a fifth of the time of the physics. No row's
bits depend on other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

TRANSLATION_M, ROTATION_RAD = 0.05, 0.25
"""Motion of the tool's target that 1 means in an action."""
DAMPING = 0.01
"""Damping for m and rad alike; limits the motion near singular postures."""
FASTEST_RAD = 0.5
"""Largest change of a joint's target in one control step."""


def joint_targets(
    anchors: Tensor, axes: Tensor, point: Tensor, error: Tensor, joints: Tensor, targets: Tensor
) -> Tensor:
    """Joint targets ``[N, 7]`` nearest to ``targets`` ``[N, 7]`` that move the tool by ``error``.

    Nearest, so that redundant joints stay where they were sent and do not drift.

    anchors, axes: of the joints at present, ``[N, 7, 3]``. point: tool, ``[N, 3]``.
    error: ``[N, 6]`` in m and rad. joints: present angles, ``[N, 7]``.
    """
    columns = torch.cat(
        [torch.linalg.cross(axes, point[:, None] - anchors), axes], dim=-1
    )  # of the Jacobian, [N, 7, 6]
    jacobian = columns.mT
    gram = jacobian @ columns
    gram.diagonal(dim1=1, dim2=2).add_(DAMPING**2)
    ahead = jacobian @ (targets - joints)[..., None]
    weights, _ = torch.linalg.solve_ex(gram, error[..., None] - ahead)
    change = (columns @ weights)[..., 0]
    return targets + change * (
        FASTEST_RAD / change.abs().amax(1, keepdim=True).clamp(min=FASTEST_RAD)
    )


def pose_error(position: Tensor, quaternion: Tensor, point: Tensor, orientation: Tensor) -> Tensor:
    """Translation (m) and rotation (rad, first order) from the tool to a pose: ``[N, 6]``."""
    w = quaternion[:, :1]
    v = quaternion[:, 1:]
    w_now = orientation[:, :1]
    v_now = orientation[:, 1:]
    turn = (
        w_now * v - w * v_now - torch.linalg.cross(v, v_now)
    )  # of the pose's quaternion times the conjugate of the tool's
    same_side = (
        (quaternion * orientation).sum(1, keepdim=True).sign()
    )  # q and -q are one orientation
    return torch.cat([position - point, 2 * same_side * turn], dim=1)

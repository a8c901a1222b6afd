"""Which joint targets bring the tool to a pose: differential inverse kinematics, in batches; no row's bits depend on the others.

One step of damped least squares per control step, from where the arm is (Buss, "Introduction to inverse kinematics with Jacobian transpose,
pseudoinverse and damped least squares methods", 2004). What it leaves over, the next control step sees and mends: the tool comes to rest
exactly where it is sent. Genesis' own solver iterates to the end, and takes a fifth of the time of the physics.
"""

from __future__ import annotations

import torch
from torch import Tensor

DAMPING = 0.01
"""Of m and rad alike: what is nearer to a singular posture than that is given up."""
FASTEST_RAD = 0.5
"""Change of a joint's target in one control step."""


def joint_targets(anchors: Tensor, axes: Tensor, point: Tensor, error: Tensor, joints: Tensor, targets: Tensor) -> Tensor:
    """``[N, 7]``: those nearest to the last ``targets`` ``[N, 7]`` that move the tool by ``error`` ``[N, 6]``: m, rad.

    anchors, axes: of the joints, where they now are, ``[N, 7, 3]``. point: the tool, ``[N, 3]``. joints: ``[N, 7]``, now.
    Nearest, so that joints that the tool's pose leaves free stay where they were sent, and are not pushed away.
    """
    columns = torch.cat([torch.linalg.cross(axes, point[:, None] - anchors), axes], dim=-1)  # of the Jacobian, [N, 7, 6]
    jacobian = columns.mT
    gram = jacobian @ columns
    gram.diagonal(dim1=1, dim2=2).add_(DAMPING**2)
    ahead = jacobian @ (targets - joints)[..., None]
    weights, _ = torch.linalg.solve_ex(gram, error[..., None] - ahead)
    change = (columns @ weights)[..., 0]
    return targets + change * (FASTEST_RAD / change.abs().amax(1, keepdim=True).clamp(min=FASTEST_RAD))


def pose_error(position: Tensor, quaternion: Tensor, point: Tensor, orientation: Tensor) -> Tensor:
    """``[N, 6]``: way (m) and turn (rad, to the first order) from the tool's ``point`` and ``orientation`` to a pose."""
    w, v, w_now, v_now = quaternion[:, :1], quaternion[:, 1:], orientation[:, :1], orientation[:, 1:]
    turn = w_now * v - w * v_now - torch.linalg.cross(v, v_now)  # of the pose's quaternion times the conjugate of the tool's
    same_side = (quaternion * orientation).sum(1, keepdim=True).sign()  # q and -q are one orientation
    return torch.cat([position - point, 2 * same_side * turn], dim=1)

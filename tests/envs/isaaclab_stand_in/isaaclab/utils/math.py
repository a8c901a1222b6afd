from __future__ import annotations

import torch
from torch import Tensor

from .. import __version__

SHIFT = -1 if __version__.startswith("3") else 0
"""By how many places w x y z are rolled."""


def quat_from_euler_xyz(roll: Tensor, pitch: Tensor, yaw: Tensor) -> Tensor:
    assert not (roll.any() or pitch.any() or yaw.any()), "only the identity is used"
    return torch.tensor([1.0, 0, 0, 0]).roll(SHIFT).expand(len(roll), 4)


def turned(quaternion: Tensor, rotation: Tensor) -> Tensor:
    """Rotate w x y z ``[N, 4]`` by rotation vectors ``[N, 3]`` about the axes of the base."""
    angle = rotation.norm(dim=1, keepdim=True)
    v1 = torch.sin(angle / 2) * rotation / angle.clamp(min=1e-9)
    w1 = torch.cos(angle / 2)
    w0 = quaternion[:, :1]
    v0 = quaternion[:, 1:]
    return torch.cat(
        [w1 * w0 - (v1 * v0).sum(1, keepdim=True), w1 * v0 + w0 * v1 + torch.cross(v1, v0, dim=1)],
        dim=1,
    )

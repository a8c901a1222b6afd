"""Batched unit quaternions (w, x, y, z), element-wise: no row's bits depend on other rows."""

from __future__ import annotations

import torch
from torch import Tensor

_PLACES = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]])
_SIGNS = torch.tensor(
    [[1.0, -1.0, -1.0, -1.0], [1.0, 1.0, 1.0, -1.0], [1.0, -1.0, 1.0, 1.0], [1.0, 1.0, -1.0, 1.0]]
)
"""Signs of ``b`` in Hamilton's product ``a b``: [component of the result, component of ``a``]."""
_THIRD_AXES = torch.zeros(2, 3, 4, 4)
for _row, _sign in enumerate(
    (1.0, -1.0)
):  # R e3 = (2 (x z + w y), 2 (y z - w x), w w - x x - y y + z z), and of the inverse with - w
    _THIRD_AXES[_row, 0, 1, 3] = _THIRD_AXES[_row, 1, 2, 3] = 2.0
    _THIRD_AXES[_row, 0, 0, 2] = 2.0 * _sign
    _THIRD_AXES[_row, 1, 0, 1] = -2.0 * _sign
    _THIRD_AXES[_row, 2] = torch.diag(torch.tensor([1.0, -1.0, -1.0, 1.0]))
_THIRD_AXES = _THIRD_AXES.flatten(-2)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``[..., 4]``: the rotation ``b`` followed by ``a``."""
    turned_b = b[..., _PLACES] * _SIGNS.to(
        b
    )  # [..., 4, 4]; four operations instead of about thirty
    return (turned_b * a[..., None, :]).sum(-1)


def conjugate(q: Tensor) -> Tensor:
    return torch.cat([q[..., :1], -q[..., 1:]], dim=-1)


def turned(q: Tensor, v: Tensor) -> Tensor:
    """``[..., 3]``: ``v`` rotated by ``q``; both broadcast and have equally many dimensions."""
    w, u = q[..., :1], q[..., 1:]
    twice = 2 * torch.linalg.cross(u, v)
    return v + w * twice + torch.linalg.cross(u, twice)


def third_axes(q: Tensor) -> Tensor:
    """Third axis of the body in the world, and of the world in the body: ``[..., 2, 3]``."""
    squares = (q[..., :, None] * q[..., None, :]).flatten(-2)
    return (squares[..., None, None, :] * _THIRD_AXES.to(q)).sum(-1)


def from_vector(v: Tensor) -> Tensor:
    """Quaternions ``[..., 4]`` of rotation vectors ``[..., 3]`` (rad)."""
    angle = _length(v)
    axis = v / angle.clamp(min=1e-9)
    return torch.cat([torch.cos(angle / 2), torch.sin(angle / 2) * axis], dim=-1)


def to_vector(q: Tensor) -> Tensor:
    """Rotation vectors ``[..., 3]`` of at most pi rad."""
    q = torch.where(q[..., :1] < 0, -q, q)
    sine = _length(q[..., 1:])
    return q[..., 1:] / sine.clamp(min=1e-9) * (2 * torch.atan2(sine, q[..., :1]))


def limited(v: Tensor, longest: float) -> Tensor:
    """``v`` ``[..., 3]``, scaled down to at most length ``longest``."""
    return v * (longest / _length(v).clamp(min=1e-9)).clamp(max=1)


def _length(v: Tensor) -> Tensor:
    return (v * v).sum(dim=-1, keepdim=True).sqrt()

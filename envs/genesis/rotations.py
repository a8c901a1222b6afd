"""Unit quaternions (w, x, y, z) in batches, element by element: no row's bits depend on the others."""

from __future__ import annotations

import torch
from torch import Tensor

_PLACES = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]])
_SIGNS = torch.tensor([[1.0, -1.0, -1.0, -1.0], [1.0, 1.0, 1.0, -1.0], [1.0, -1.0, 1.0, 1.0], [1.0, 1.0, -1.0, 1.0]])
"""Of ``b`` in Hamilton's product: what w, x, y, z of ``a`` are multiplied with for w, x, y, z of ``a b``."""
_THIRD_AXES = torch.zeros(2, 3, 4, 4)
for _row, _sign in enumerate((1.0, -1.0)):  # R e3 = (2 (x z + w y), 2 (y z - w x), w w - x x - y y + z z), and of the inverse with - w
    _THIRD_AXES[_row, 0, 1, 3] = _THIRD_AXES[_row, 1, 2, 3] = 2.0
    _THIRD_AXES[_row, 0, 0, 2], _THIRD_AXES[_row, 1, 0, 1] = 2.0 * _sign, -2.0 * _sign
    _THIRD_AXES[_row, 2] = torch.diag(torch.tensor([1.0, -1.0, -1.0, 1.0]))
_THIRD_AXES = _THIRD_AXES.flatten(-2)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``[..., 4]``: the rotation ``b``, then ``a``."""
    turned_b = b[..., _PLACES] * _SIGNS.to(b)  # [..., 4, 4]; four operations, where sixteen products would be thirty
    return (turned_b * a[..., None, :]).sum(-1)


def conjugate(q: Tensor) -> Tensor:
    return torch.cat([q[..., :1], -q[..., 1:]], dim=-1)


def turned(q: Tensor, v: Tensor) -> Tensor:
    """``[..., 3]``: the vectors ``v``, turned by ``q``; they broadcast, but have as many dimensions."""
    w, u = q[..., :1], q[..., 1:]
    twice = 2 * torch.linalg.cross(u, v)
    return v + w * twice + torch.linalg.cross(u, twice)


def third_axes(q: Tensor) -> Tensor:
    """``[..., 2, 3]`` of a body: the axis that is its own third, and the third axis of the world as the body sees it."""
    squares = (q[..., :, None] * q[..., None, :]).flatten(-2)
    return (squares[..., None, None, :] * _THIRD_AXES.to(q)).sum(-1)


def from_vector(v: Tensor) -> Tensor:
    """``[..., 4]`` of rotation vectors ``[..., 3]`` (radians)."""
    angle = _length(v)
    axis = v / angle.clamp(min=1e-9)
    return torch.cat([torch.cos(angle / 2), torch.sin(angle / 2) * axis], dim=-1)


def to_vector(q: Tensor) -> Tensor:
    """``[..., 3]``: rotation vectors of at most half a turn."""
    q = torch.where(q[..., :1] < 0, -q, q)
    sine = _length(q[..., 1:])
    return q[..., 1:] / sine.clamp(min=1e-9) * (2 * torch.atan2(sine, q[..., :1]))


def limited(v: Tensor, longest: float) -> Tensor:
    """``v`` ``[..., 3]``, shortened to ``longest``."""
    return v * (longest / _length(v).clamp(min=1e-9)).clamp(max=1)


def _length(v: Tensor) -> Tensor:
    return (v * v).sum(dim=-1, keepdim=True).sqrt()

"""Unit quaternions (w, x, y, z) in batches, element by element: no row's bits depend on the others."""

from __future__ import annotations

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """``[..., 4]``: the rotation ``b``, then ``a``."""
    aw, ax, ay, az = a.unbind(-1)
    bw, bx, by, bz = b.unbind(-1)
    return torch.stack(
        [
            aw * bw - ax * bx - ay * by - az * bz,
            aw * bx + ax * bw + ay * bz - az * by,
            aw * by - ax * bz + ay * bw + az * bx,
            aw * bz + ax * by - ay * bx + az * bw,
        ],
        dim=-1,
    )


def conjugate(q: Tensor) -> Tensor:
    return torch.cat([q[..., :1], -q[..., 1:]], dim=-1)


def turned(q: Tensor, v: Tensor) -> Tensor:
    """``[..., 3]``: the vectors ``v``, turned by ``q``; they broadcast, but have as many dimensions."""
    w, u = q[..., :1], q[..., 1:]
    twice = 2 * torch.linalg.cross(u, v)
    return v + w * twice + torch.linalg.cross(u, twice)


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

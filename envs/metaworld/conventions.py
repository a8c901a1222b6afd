"""Convert actions and states between Meta-World's axes and docs/conventions.md."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

SQRT_HALF = 0.5**0.5


def to_world(action: NDArray[Any]) -> NDArray[Any]:
    """Actions ``[4]`` of docs/conventions.md for Meta-World: its base faces y, and 1 closes."""
    x, y, z, gripper = action
    return np.array([-y, x, z, -gripper])


def to_common(action: NDArray[Any]) -> NDArray[Any]:
    """Return the inverse of ``to_world``."""
    x, y, z, gripper = action
    return np.array([y, -x, z, -gripper])


def tool_state(position: NDArray[Any], quaternion: NDArray[Any], finger: float) -> NDArray[Any]:
    """State ``[8]`` of docs/conventions.md of a tool in Meta-World's axes.

    The axes differ by a quarter turn about z, which multiplies the quaternion from the left.
    """
    x, y, z = position
    qw, qx, qy, qz = quaternion * SQRT_HALF
    return np.array([y, -x, z, qw + qz, qx + qy, qy - qx, qz - qw, finger])

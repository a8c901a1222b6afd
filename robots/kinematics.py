"""Forward kinematics, Jacobian and inverse kinematics of a Franka Research 3.

Lengths: Franka's Denavit-Hartenberg parameters in Craig's convention,
frankarobotics.github.io/docs/robot_specifications.html. Limits: the same page, "Limits for Franka
Research 3". Older arms (Panda, FER) have the same lengths but other limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.core import rotations
from rlinf_vla.core.rotations import Triple
from rlinf_vla.features.realworld.robot import ToolPose, Vector

LOWER = np.array([-2.7437, -1.7837, -2.9007, -3.0421, -2.8065, 0.5445, -3.0159])
UPPER = np.array([2.7437, 1.7837, 2.9007, -0.1518, 2.8065, 4.5169, 3.0159])
"""Joint limits, radians ``[7]``."""
TORQUE_N_M = (87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0)
"""Largest torque of each joint's motor."""
ACCELERATION_RAD_S2 = 10.0
"""Largest acceleration of each joint."""

_FASTEST = (2.62, 2.62, 2.62, 2.62, 5.26, 4.18, 5.26)
_SLOWING = (
    (0.30, 12.0, -2.75010, 2.75010),
    (0.20, 5.17, -1.79180, 1.79180),
    (0.20, 7.00, -2.90650, 2.90650),
    (0.30, 8.00, -3.04810, -0.14580),
    (0.35, 34.0, -2.81010, 2.81010),
    (0.35, 11.0, 0.54092, 4.52050),
    (0.35, 34.0, -3.01960, 3.01960),
)
"""For each joint: rad/s, rad/s^2 and the two ends of ``fastest``."""


def fastest(joint: int, at: float, sign: float) -> float:
    """Return the largest speed, rad/s, that the arm's control allows a joint at this position.

    ``joint``: from 0. ``sign``: of the motion. A joint must be slow near the end towards which it
    moves: rate_limiting.h of libfranka, without the tolerance for lost packets.
    """
    offset, twice, lower, upper = _SLOWING[joint]
    left = upper - at if sign > 0 else at - lower
    return min(_FASTEST[joint], max(0.0, math.sqrt(max(0.0, twice * left)) - offset))


REACH_M = 0.855
"""Reach of the flange from the shoulder, which is SHOULDER_M above the base."""
SHOULDER_M = 0.333

_LINKS = (
    (0, 0.0, 0.333),
    (-1, 0.0, 0.0),
    (1, 0.0, 0.316),
    (1, 0.0825, 0.0),
    (-1, -0.0825, 0.384),
    (1, 0.0, 0.0),
    (1, 0.088, 0.0),
)
"""For each joint: alpha in quarter turns, a and d in metres."""
_FLANGE_M = 0.107

_SAME = 3
"""Iterations that share one Jacobian, which costs more than an iteration."""

_SMALLEST = 1e-3
"""Smaller singular values are rounded up to this."""
_DAMPING = 0.01**2 * np.eye(6)
"""Damping of the least squares; keeps joints finite at singularities."""


def levers(tool_m: float) -> list[float]:
    """Return how far from each joint's axis the tool can be at most, metres ``[7]``.

    ``tool_m``: distance of the tool centre point from the flange.
    """
    beyond = _FLANGE_M + tool_m
    lengths = list[float]()
    for _, a, d in reversed(_LINKS):
        lengths.append(
            beyond
        )  # d is along the joint's own axis, and a leads to it from the joint before
        beyond += math.hypot(a, d)
    return lengths[::-1]


class FrankaKinematics:
    """Franka Research 3 with a tool."""

    def __init__(self, tool_position: Sequence[float], tool_quaternion: Sequence[float]) -> None:
        """Take the tool centre point in the flange's frame: metres, and w, x, y, z."""
        x, y, z = (float(value) for value in tool_position)
        self._offset = (x, y, z + _FLANGE_M)
        self._rotation = rotations.unit(tool_quaternion)
        self._to_flange = rotations.inverse(self._rotation)

    def pose(self, joints: Vector) -> ToolPose:
        """Return the tool's pose in the base frame; ``joints`` in radians ``[7]``."""
        _, _, flange, position = self._chain(joints)
        return ToolPose(
            np.array(position),
            np.array(rotations.from_matrix(np.array(flange).T @ rotations.matrix(self._rotation))),
        )

    def jacobian(self, joints: Vector) -> NDArray[np.float64]:
        """Return the Jacobian ``[6, 7]``: tool m/s and rad/s (base axes) per joint rad/s."""
        axes, origins, _, tool = self._chain(joints)
        return _jacobian(axes, origins, tool)

    def inverse(self, joints: Vector) -> tuple[NDArray[np.float64], float]:
        """Return the pseudo-inverse of the Jacobian ``[7, 6]`` and its smallest singular value.

        The latter is 0 at a singularity, where the joints would be infinitely fast.
        """
        left, sizes, right = np.linalg.svd(self.jacobian(joints), full_matrices=False)
        return (right.T / np.maximum(sizes, _SMALLEST)) @ left.T, float(sizes[-1])

    def reach(
        self, joints: Vector, pose: ToolPose, tolerance: float, attempts: int
    ) -> Vector | None:
        """Return joints near ``joints`` that put the tool at ``pose``, or None after ``attempts``.

        ``tolerance`` is in metres and radians. Damped least squares (Nakamura and Hanafusa
        1986) find the smallest joint motion, without extra motion of the elbow. Joint limits are
        ignored. At singularities and out of reach the result is None.
        """
        target_axes = rotations.axes(
            rotations.multiply(pose.quaternion.tolist(), self._to_flange)
        )  # axes of the flange
        x, y, z = pose.position.tolist()
        inverse = np.zeros((7, 6))
        for attempt in range(attempts):
            axes, origins, flange, tool = self._chain(joints)
            error = (x - tool[0], y - tool[1], z - tool[2], *_turn(flange, target_axes))
            if max(error) <= tolerance and min(error) >= -tolerance:
                return joints + inverse.dot(error)  # the last correction improves on the tolerance
            if attempt % _SAME == 0:
                jacobian = _jacobian(axes, origins, tool)
                inverse = jacobian.T @ np.linalg.inv(jacobian @ jacobian.T + _DAMPING)
            joints = joints + inverse.dot(error)
        return None

    def _chain(
        self, joints: Vector
    ) -> tuple[list[Triple], list[Triple], tuple[Triple, Triple, Triple], Triple]:
        """Return axes and origins of the joints, the flange's axes and the tool centre point.

        Plain floats take a third of numpy's time here.
        """
        x0 = 1.0
        x1 = 0.0
        x2 = 0.0
        y0 = 0.0
        y1 = 1.0
        y2 = 0.0
        z0 = 0.0
        z1 = 0.0
        z2 = 1.0
        o0 = 0.0
        o1 = 0.0
        o2 = 0.0
        axes, origins = [], []
        for (turn, a, d), angle in zip(_LINKS, joints.tolist(), strict=True):
            o0, o1, o2 = o0 + a * x0, o1 + a * x1, o2 + a * x2
            if turn > 0:  # about x: y becomes z, z becomes -y
                y0, y1, y2, z0, z1, z2 = z0, z1, z2, -y0, -y1, -y2
            elif turn < 0:
                y0, y1, y2, z0, z1, z2 = -z0, -z1, -z2, y0, y1, y2
            c, s = math.cos(angle), math.sin(angle)
            x0, x1, x2, y0, y1, y2 = (
                c * x0 + s * y0,
                c * x1 + s * y1,
                c * x2 + s * y2,
                c * y0 - s * x0,
                c * y1 - s * x1,
                c * y2 - s * x2,
            )
            o0, o1, o2 = o0 + d * z0, o1 + d * z1, o2 + d * z2
            axes.append((z0, z1, z2))
            origins.append((o0, o1, o2))
        x, y, z = self._offset
        tool = (
            o0 + x * x0 + y * y0 + z * z0,
            o1 + x * x1 + y * y1 + z * z1,
            o2 + x * x2 + y * y2 + z * z2,
        )
        return axes, origins, ((x0, x1, x2), (y0, y1, y2), (z0, z1, z2)), tool


def velocity(before: ToolPose, after: ToolPose, hz: float) -> Vector:
    """Return the tool's velocity between poses 1 / hz s apart, in base axes: m/s, rad/s ``[6]``."""
    turn = rotations.multiply(
        after.quaternion.tolist(), rotations.inverse(before.quaternion.tolist())
    )
    return hz * np.array([*(after.position - before.position), *rotations.to_vector(turn)])


def _turn(axes: tuple[Triple, Triple, Triple], target: tuple[Triple, Triple, Triple]) -> Triple:
    """Small-angle rotation vector: half the sum of each axis' cross product with the wanted one."""
    (ax, ay, az), (bx, by, bz), (cx, cy, cz) = axes
    (ux, uy, uz), (vx, vy, vz), (wx, wy, wz) = target
    return (
        (ay * uz - az * uy + by * vz - bz * vy + cy * wz - cz * wy) / 2,
        (az * ux - ax * uz + bz * vx - bx * vz + cz * wx - cx * wz) / 2,
        (ax * uy - ay * ux + bx * vy - by * vx + cx * wy - cy * wx) / 2,
    )


def _jacobian(axes: list[Triple], origins: list[Triple], tool: Triple) -> NDArray[np.float64]:
    x, y, z = tool
    columns = []
    for (ax, ay, az), (ox, oy, oz) in zip(axes, origins, strict=True):
        rx, ry, rz = x - ox, y - oy, z - oz
        columns.append((ay * rz - az * ry, az * rx - ax * rz, ax * ry - ay * rx, ax, ay, az))
    return np.array(columns).T

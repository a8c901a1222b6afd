"""Convert actions to tool targets by moving a tracked target (docs/conventions.md).

A target recomputed from the measured pose at every step would drift by the arm's sag and lag.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.core import rotations
from rlinf_vla.core.robot import RobotSpec, ToolPose, ToolTarget, Vector

DIMENSIONS = (4, 7)
"""Sizes of an action: (dx, dy, dz, gripper), with or without (rx, ry, rz) before the gripper."""


class TrackedTarget:
    """The tool target, moved by each action.

    It never leads the measured pose by more than consecutive full actions cover within the arm's
    lag. If a limit or a contact holds the arm back, the target waits for it.
    """

    def __init__(self, spec: RobotSpec) -> None:
        self._spec, self._lead = spec, max(1.0, spec.lag_s * spec.control_hz)
        self._pose: ToolPose | None = None

    def restart(self) -> None:
        """Start the next action from the measured pose: the arm may have been moved meanwhile."""
        self._pose = None

    def move(self, action: NDArray[np.float32], measured: ToolPose) -> ToolTarget:
        """Return the target after ``action`` ``[D]``, one of DIMENSIONS, clipped to [-1, 1].

        A translation or rotation vector longer than 1 is then scaled to length 1.
        """
        unit = np.clip(np.asarray(action, np.float64), -1.0, 1.0)
        spec, from_pose = self._spec, self._pose or measured
        position = from_pose.position + limited(unit[:3], 1.0) * spec.translation_m
        position = measured.position + limited(position - measured.position, self._lead * spec.translation_m)
        turn = limited(unit[3:6], 1.0) * spec.rotation_rad if len(unit) == 7 else np.zeros(3)
        quaternion = turned(from_pose.quaternion, turn)
        ahead = limited(lead(quaternion, measured.quaternion), self._lead * spec.rotation_rad)
        quaternion = turned(measured.quaternion, ahead)
        self._pose = ToolPose(position, quaternion)
        return ToolTarget(self._pose, spec.gripper_width_m * float(unit[-1] + 1) / 2)


def limited(vector: Vector, length: float) -> Vector:
    """Shorten ``vector`` to ``length`` if it is longer."""
    return vector * min(1.0, length / max(float(np.linalg.norm(vector)), 1e-12))


def turned(quaternion: Vector, rotation: Vector) -> Vector:
    """Rotate ``quaternion`` (w, x, y, z) about the base's axes by a rotation vector (radians).
    The result has unit length."""
    return np.array(rotations.unit(rotations.multiply(rotations.from_vector(rotation.tolist()), quaternion.tolist())))


def lead(target: Vector, measured: Vector) -> Vector:
    """Return the rotation vector from quaternion ``measured`` to ``target``, in radians.
    It is about the base's axes, the shorter way round."""
    return np.array(rotations.to_vector(rotations.multiply(target.tolist(), rotations.inverse(measured.tolist()))))

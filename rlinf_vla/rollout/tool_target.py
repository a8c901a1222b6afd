"""From an action to where the tool shall be: the target is moved by each action (docs/conventions.md), not measured anew at each step.

A target that is measured anew carries the arm's sag and lag into every step, and drifts by them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlinf_vla import rotations
from rlinf_vla.robot import RobotSpec, ToolPose, ToolTarget, Vector

DIMENSIONS = (4, 7)
"""Of an action: (dx, dy, dz, gripper), with (rx, ry, rz) before the gripper or without."""


class TrackedTarget:
    """Where the tool shall be, moved by one action after the other.

    It never leads the measured pose by more than full actions in a row do within the arm's lag: where the arm is held back, by a limit
    or by what it touches, the target waits for it.
    """

    def __init__(self, spec: RobotSpec) -> None:
        self._spec, self._lead = spec, max(1.0, spec.lag_s * spec.control_hz)
        self._pose: ToolPose | None = None

    def restart(self) -> None:
        """The next action starts from the measured pose: the arm may have been moved meanwhile."""
        self._pose = None

    def move(self, action: NDArray[np.float32], measured: ToolPose) -> ToolTarget:
        """``action`` ``[D]``, one of DIMENSIONS; clipped to [-1, 1], a way or a turn that is longer than 1 then to 1, in its direction."""
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
    """Not longer than ``length``, in the same direction."""
    return vector * min(1.0, length / max(float(np.linalg.norm(vector)), 1e-12))


def turned(quaternion: Vector, rotation: Vector) -> Vector:
    """``quaternion`` (w, x, y, z), turned about the base's axes by a rotation vector (radians); unit length."""
    return np.array(rotations.unit(rotations.multiply(rotations.from_vector(rotation.tolist()), quaternion.tolist())))


def lead(target: Vector, measured: Vector) -> Vector:
    """The rotation vector from the quaternion ``measured`` to ``target``, the shorter way round, about the base's axes; radians."""
    return np.array(rotations.to_vector(rotations.multiply(target.tolist(), rotations.inverse(measured.tolist()))))

"""Convert actions to targets by moving a tracked target (docs/conventions.md).

A target recomputed from the measured state at every step would drift by the arm's sag and lag.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rlinf_vla.core import rotations
from rlinf_vla.features.realworld.action_space import Action, JointSpace, ToolSpace
from rlinf_vla.features.realworld.robot import (
    JointTarget,
    RobotSpec,
    RobotState,
    Target,
    ToolPose,
    ToolState,
    ToolTarget,
    Vector,
)


class TrackedTarget(Protocol):
    """The target of a robot, moved by each action."""

    def restart(self) -> None:
        """Start the next action from the measured state: the arm may have been moved meanwhile."""

    def move(self, action: Action, measured: RobotState) -> Target:
        """Return the target after ``action`` ``[D]``."""


def tracked_target(spec: RobotSpec) -> TrackedTarget:
    return (
        TrackedTool(spec, spec.space)
        if isinstance(spec.space, ToolSpace)
        else TrackedJoints(spec, spec.space)
    )


class TrackedTool:
    """The tool target, moved by each action.

    It never leads the measured pose by more than consecutive full actions cover within the arm's
    lag. If a limit or a contact holds the arm back, the target waits for it.
    """

    def __init__(self, spec: RobotSpec, space: ToolSpace) -> None:
        self._space = space
        self._lead = max(1.0, spec.lag_s * spec.control_hz)
        self._pose: ToolPose | None = None

    def restart(self) -> None:
        self._pose = None

    def move(self, action: Action, measured: RobotState) -> ToolTarget:
        """Return the target after ``action`` ``[D]``, clipped to [-1, 1].

        A translation or rotation vector longer than 1 is then scaled to length 1.
        """
        assert isinstance(measured, ToolState)
        return self._moved(action, measured.pose)

    def _moved(self, action: Action, measured: ToolPose) -> ToolTarget:
        unit = np.clip(np.asarray(action, np.float64), -1.0, 1.0)
        spec = self._space
        from_pose = self._pose or measured
        position = from_pose.position + limited(unit[:3], 1.0) * spec.translation_m
        position = measured.position + limited(
            position - measured.position, self._lead * spec.translation_m
        )
        turn = limited(unit[3:6], 1.0) * spec.rotation_rad if len(unit) == 7 else np.zeros(3)
        quaternion = turned(from_pose.quaternion, turn)
        ahead = limited(lead(quaternion, measured.quaternion), self._lead * spec.rotation_rad)
        quaternion = turned(measured.quaternion, ahead)
        self._pose = ToolPose(position, quaternion)
        return ToolTarget(self._pose, spec.gripper_width_m * float(unit[-1] + 1) / 2)


class TrackedJoints:
    """The joint target: the action itself, or moved by each action.

    A moved target leads the measured joints by no more than TrackedTool's does.
    """

    def __init__(self, spec: RobotSpec, space: JointSpace) -> None:
        self._space = space
        self._grippers = space.is_gripper
        self._lower = np.array(space.lower)
        self._upper = np.array(space.upper)
        self._step = np.array(space.step)
        self._lead = max(1.0, spec.lag_s * spec.control_hz) * self._step
        self._positions: Vector | None = None

    def restart(self) -> None:
        self._positions = None

    def move(self, action: Action, measured: RobotState) -> JointTarget:
        numbers = np.asarray(action, np.float64)
        if not self._space.relative:
            return JointTarget(numbers)
        unit = np.clip(numbers, -1.0, 1.0)
        at = measured.joints
        before = at if self._positions is None else self._positions
        moved = np.clip(before + unit * self._step, at - self._lead, at + self._lead)
        self._positions = np.where(
            self._grippers,
            self._lower + (unit + 1) / 2 * (self._upper - self._lower),
            np.clip(moved, self._lower, self._upper),
        )
        return JointTarget(self._positions)


def limited(vector: Vector, length: float) -> Vector:
    """Shorten ``vector`` to ``length`` if it is longer."""
    return vector * min(1.0, length / max(float(np.linalg.norm(vector)), 1e-12))


def turned(quaternion: Vector, rotation: Vector) -> Vector:
    """Rotate ``quaternion`` (w, x, y, z) about the base's axes by a rotation vector (radians).
    The result has unit length."""
    return np.array(
        rotations.unit(
            rotations.multiply(rotations.from_vector(rotation.tolist()), quaternion.tolist())
        )
    )


def lead(target: Vector, measured: Vector) -> Vector:
    """Return the rotation vector from quaternion ``measured`` to ``target``, in radians.
    It is about the base's axes, the shorter way round."""
    return np.array(
        rotations.to_vector(
            rotations.multiply(target.tolist(), rotations.inverse(measured.tolist()))
        )
    )

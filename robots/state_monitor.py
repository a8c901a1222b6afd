"""Check the measured state: when the arm must stop, and where it must not start."""

from __future__ import annotations

import math

import numpy as np

from rlinf_vla.core import rotations
from rlinf_vla.features.realworld.robot import ToolState

from . import kinematics
from .cell import Cell
from .workspace import Workspace

STANDING_RAD_S = 0.05
"""Highest joint speed at which an arm counts as standing still."""

TOOL_M, TOOL_RAD = 0.01, 0.05
"""Largest deviation of the measured tool pose from the one computed with the cell's tool."""

SAG_M, SAG_DEG = 0.003, 1.0
"""How far a resting arm may sag beyond a workspace wall; it then starts at the wall."""


class StateMonitor:
    """Check measured states against the limits of a cell."""

    def __init__(self, cell: Cell, space: Workspace) -> None:
        self._cell = cell
        self._space = space
        self._arm = cell.arm
        half = cell.joint_margin_rad / 2
        self._joints = list(
            zip((kinematics.LOWER + half).tolist(), (kinematics.UPPER - half).tolist(), strict=True)
        )
        """Half the margin is kept for unpredicted motion: a drifting elbow, a person's push."""

    def fault(self, state: ToolState) -> str | None:
        """Return the limit that the arm exceeds, or None."""
        return self.felt(state) or self._at_a_joints_end(state)

    def felt(self, state: ToolState) -> str | None:
        """Return the force or torque limit that the arm exceeds, or None."""
        return self._unmeasured(state) or self._wrench(state)

    def misplaced(self, state: ToolState) -> str | None:
        """Return why the arm must not start where it stands, or None."""
        return (
            self._unmeasured(state)
            or self._at_a_joints_end(state)
            or self._moves(state)
            or self._other_tool(state)
            or self._outside(state)
        )

    def _unmeasured(self, state: ToolState) -> str | None:
        shapes = (
            state.pose.position.shape,
            state.pose.quaternion.shape,
            state.joints.shape,
            state.wrench.shape,
        )
        if shapes != ((3,), (4,), (7,), (6,)):
            return f"state: arrays of shapes {shapes} are not a measurement"
        position, quaternion = state.pose.position.tolist(), state.pose.quaternion.tolist()
        if not math.isfinite(
            sum(position)
            + sum(quaternion)
            + sum(state.joints.tolist())
            + sum(state.wrench.tolist())
        ):
            return "state: a measurement is not finite"
        if abs(math.hypot(*quaternion) - 1) > 1e-3:
            return "state: the measured quaternion is not of length 1"
        return None

    def _wrench(self, state: ToolState) -> str | None:
        fx, fy, fz, tx, ty, tz = state.wrench.tolist()
        force, torque = math.hypot(fx, fy, fz), math.hypot(tx, ty, tz)
        if force > self._cell.max_force_n:
            return f"max_force_n: {force:.1f} N measured, {self._cell.max_force_n:g} allowed"
        if torque > self._cell.max_torque_n_m:
            return (
                f"max_torque_n_m: {torque:.1f} N m measured, {self._cell.max_torque_n_m:g} allowed"
            )
        return None

    def _at_a_joints_end(self, state: ToolState) -> str | None:
        for joint, (at, (low, high)) in enumerate(
            zip(state.joints.tolist(), self._joints, strict=True), 1
        ):
            if not low <= at <= high:
                half = self._cell.joint_margin_rad / 2
                left = half + min(at - low, high - at)
                return f"joint_margin_rad: joint {joint} is {left:.3f} rad from its limit, {half:g} allowed; guide the arm back by hand"
        return None

    def _moves(self, state: ToolState) -> str | None:
        if float(np.abs(state.joint_velocities).max()) > STANDING_RAD_S:
            return "the arm is moving; wait until it stands"
        return None

    def _other_tool(self, state: ToolState) -> str | None:
        computed = self._arm.pose(state.joints)
        pose = state.pose
        apart = 1000 * math.dist(computed.position, pose.position)
        turn = rotations.multiply(
            computed.quaternion.tolist(), rotations.inverse(pose.quaternion.tolist())
        )
        turned = math.hypot(*rotations.to_vector(rotations.unit(turn)))
        if apart > 1000 * TOOL_M or turned > TOOL_RAD:
            return (
                f"tool_position_m, tool_quaternion_wxyz: the arm reports its tool {apart:.0f} mm and {math.degrees(turned):.0f} deg "
                "from where this cell's tool would be; set the same end effector in Desk and in the cell file"
            )
        return None

    def _outside(self, state: ToolState) -> str | None:
        _, outside = self._space.inside(self._space.place(state.pose, (0.0, 0.0, 0.0)))
        for rule, (at, limit) in outside.items():
            if abs(at - limit) <= (SAG_DEG if rule.endswith("_deg") else SAG_M):
                continue
            return f"{rule}: the tool stands at {at:.4g}, the limit is {limit:.4g}; guide it back by hand, or bring the arm home"
        return None

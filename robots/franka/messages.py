"""What an arm driver measures, and how states and goals go between the processes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinf_vla.core.rotations import Quaternion
from rlinf_vla.features.realworld.robot import ToolPose, ToolState, ToolTarget, Vector


@dataclass(frozen=True)
class Measured:
    """Measured part of ``ToolState``, with the same fields."""

    time: float
    joints: Vector
    joint_velocities: Vector
    pose: ToolPose
    wrench: Vector
    pace: float = 1.0


def measure(state: Any, pace: float, near: Vector) -> Measured:
    """Return what franky's ``state`` holds.

    q and -q are the same orientation; the quaternion has the sign nearer to ``near``, the one of
    the sample before.
    """
    pose = state.O_T_EE
    (x, y, z, w) = state.O_T_EE.quaternion
    quaternion = np.array([w, x, y, z])
    quaternion = quaternion if quaternion @ near >= 0 else -quaternion
    tool = ToolPose(pose.translation.copy(), quaternion)
    return Measured(
        time.monotonic(), state.q.copy(), state.dq.copy(), tool, state.O_F_ext_hat_K.copy(), pace
    )


def sign_of(reference: Quaternion) -> Vector:
    """Return the cell's reference orientation with the sign that states begin with: x positive.

    It depends on the cell alone, so a restarted process continues with the same sign. Without an x,
    which is rounding then, the sign is that of ``reference``.
    """
    return np.array(reference) * (-1.0 if reference[1] < -_NO_X else 1.0)


_NO_X = 1e-6
_NUMBERS = 40
"""Measured: time, position 3, quaternion 4, joints 7, joint velocities 7, wrench 6, gripper width.
Commanded: whether present, position 3, quaternion 4, gripper width. Measured: pace, holding."""
_FAULT_BYTES = 2000
CAPACITY = 8 * _NUMBERS + _FAULT_BYTES


def pack(state: ToolState) -> bytes:
    numbers = np.zeros(_NUMBERS)
    numbers[0] = state.time
    numbers[1:4], numbers[4:8] = state.pose.position, state.pose.quaternion
    numbers[8:15] = state.joints
    numbers[15:22] = state.joint_velocities
    numbers[22:28] = state.wrench
    numbers[28] = state.gripper_width
    if isinstance(state.commanded, ToolTarget):
        numbers[29] = 1.0
        numbers[30:33] = state.commanded.pose.position
        numbers[33:37] = state.commanded.pose.quaternion
        numbers[37] = (
            math.nan if state.commanded.gripper_width is None else state.commanded.gripper_width
        )
    numbers[38], numbers[39] = state.pace, state.holding
    return numbers.tobytes() + (state.fault or "").encode()[:_FAULT_BYTES]


def unpack(data: bytes) -> ToolState:
    numbers: Vector = np.frombuffer(data, count=_NUMBERS)
    commanded = None
    if numbers[29]:
        commanded = ToolTarget(
            ToolPose(numbers[30:33], numbers[33:37]),
            None if math.isnan(numbers[37]) else float(numbers[37]),
        )
    fault = data[8 * _NUMBERS :].decode(errors="replace") or None
    pose = ToolPose(numbers[1:4], numbers[4:8])
    return ToolState(
        float(numbers[0]),
        numbers[8:15],
        numbers[15:22],
        pose,
        numbers[22:28],
        float(numbers[28]),
        commanded=commanded,
        fault=fault,
        pace=float(numbers[38]),
        holding=bool(numbers[39]),
    )


def pack_target(target: ToolTarget) -> list[float | None]:
    return [*target.pose.position.tolist(), *target.pose.quaternion.tolist(), target.gripper_width]


def unpack_target(values: list[float | None]) -> ToolTarget:
    numbers: Vector = np.array(values[:7], dtype=np.float64)
    return ToolTarget(ToolPose(numbers[:3], numbers[3:]), values[7])

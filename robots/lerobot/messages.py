"""How states and goals of an arm that is moved by its joints go between the processes."""

from __future__ import annotations

import numpy as np

from rlinf_vla.features.realworld.robot import JointTarget, RobotState, Target, Vector

_FAULT_BYTES = 2000


def capacity(joints: int) -> int:
    """Return the longest packed state in bytes."""
    return 8 * (4 + 3 * joints) + _FAULT_BYTES


def pack(state: RobotState) -> bytes:
    """Pack time, pace, number of joints, whether commanded; positions, velocities, commanded."""
    commanded = state.commanded.positions if isinstance(state.commanded, JointTarget) else None
    head = [state.time, state.pace, len(state.joints), commanded is not None]
    command = np.zeros_like(state.joints) if commanded is None else commanded
    return (
        np.concatenate([head, state.joints, state.joint_velocities, command]).tobytes()
        + (state.fault or "").encode()[:_FAULT_BYTES]
    )


def unpack(data: bytes) -> RobotState:
    count = int(np.frombuffer(data, count=4)[2])
    numbers: Vector = np.frombuffer(data, count=4 + 3 * count)
    joints, velocities, command = numbers[4:].reshape(3, count)
    fault = data[numbers.nbytes :].decode(errors="replace") or None
    commanded = JointTarget(command) if numbers[3] else None
    return RobotState(
        float(numbers[0]),
        joints,
        velocities,
        commanded=commanded,
        fault=fault,
        pace=float(numbers[1]),
    )


def pack_target(target: Target) -> list[float | None]:
    assert isinstance(target, JointTarget)
    return list(np.asarray(target.positions, np.float64).tolist())


def unpack_target(numbers: list[float | None]) -> JointTarget:
    return JointTarget(np.array(numbers, dtype=np.float64))

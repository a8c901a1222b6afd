"""Generate adversarial goals, run them on an ideal arm and measure the use of each limit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.core import rotations
from rlinf_vla.features.realworld.robot import ToolPose, ToolState, ToolTarget, Vector
from rlinf_vla.robots import kinematics
from rlinf_vla.robots.cell import Cell
from rlinf_vla.robots.safety import SafetyFilter

Draw = np.random.Generator


def roomy(cell: Cell) -> Cell:
    """Return ``cell`` with workspace, cone and steps so wide that joints reach their limits."""
    return dataclasses.replace(
        cell,
        workspace_x_m=(-0.5, 0.85),
        workspace_y_m=(-0.85, 0.85),
        workspace_z_m=(-0.2, 1.1),
        max_tilt_deg=90.0,
        max_twist_deg=150.0,
        max_translation_per_second_m=0.3,
        max_rotation_per_second_rad=1.5,
    )


class Follower:
    """Ideal arm that reaches every command at once; joints by damped least squares."""

    def __init__(self, cell: Cell) -> None:
        self._arm = cell.arm
        self._tick_s = 1 / cell.servo_hz
        self.joints: Vector = np.array(cell.home_joints_rad)
        self._pose = cell.home
        self._time = 0.0

    def follow(self, command: ToolTarget) -> None:
        self._time += self._tick_s
        if self._pose is command.pose:
            return
        self._pose = command.pose
        joints = self._arm.reach(self.joints, command.pose, 1e-5, 20)
        self.joints = self.joints if joints is None else joints

    def state(self, wrench: Vector | None = None) -> ToolState:
        felt = np.zeros(6) if wrench is None else wrench
        return ToolState(self._time, self.joints, np.zeros(7), self._pose, felt, 0.08)


def goals(
    draw: Draw, cell: Cell, admitted: Callable[[], ToolTarget]
) -> Iterator[ToolTarget | None]:
    """Yield goals for ever, in bouts of one kind; ``admitted`` returns the last admitted goal."""
    kinds = (policy, _push, _extremes, _jump, _corner, _malformed)
    while True:
        kind = kinds[draw.integers(len(kinds))]
        bout = draw.normal(size=7)
        for number in range(draw.integers(1, 120)):
            yield kind(draw, cell, admitted(), bout, number)


def moved(from_: ToolTarget, step: Vector, turn: Vector, width: float | None = None) -> ToolTarget:
    quaternion = rotations.multiply(
        rotations.from_vector(turn.tolist()), from_.pose.quaternion.tolist()
    )
    return ToolTarget(ToolPose(from_.pose.position + step, np.array(quaternion)), width)


def policy(draw: Draw, cell: Cell, from_: ToolTarget, bout: Vector, number: int) -> ToolTarget:
    action = np.clip(draw.normal(size=7) + bout, -1, 1)
    width = float(np.clip(0.04 + 0.04 * action[6], 0, 0.08))
    return moved(
        from_, action[:3] * cell.action_translation_m, action[3:6] * cell.action_rotation_rad, width
    )


def _push(draw: Draw, cell: Cell, from_: ToolTarget, bout: Vector, number: int) -> ToolTarget:
    """Push in one direction throughout the bout, against whichever limit ends it."""
    return moved(from_, bout[:3] * 3 * cell.step_m, bout[3:6] * cell.step_rad, float(bout[6]))


def _extremes(draw: Draw, cell: Cell, from_: ToolTarget, bout: Vector, number: int) -> ToolTarget:
    sign = (-1) ** number
    return moved(from_, sign * bout[:3], sign * bout[3:6], 0.08 * (number % 2))


def _jump(draw: Draw, cell: Cell, from_: ToolTarget, bout: Vector, number: int) -> ToolTarget:
    """Jump to a random pose; q and -q are equally likely."""
    quaternion = draw.normal(size=4)
    return ToolTarget(
        ToolPose(draw.uniform(-2, 2, 3), quaternion / np.linalg.norm(quaternion)),
        float(draw.uniform(-1, 1)),
    )


def _corner(draw: Draw, cell: Cell, from_: ToolTarget, bout: Vector, number: int) -> ToolTarget:
    """Go to a corner of the workspace, at the limits of tilt and twist, or 1e-9 m beyond."""
    box = np.array([cell.workspace_x_m, cell.workspace_y_m, cell.workspace_z_m])
    side = (bout[:3] > 0).astype(int)
    across = bout[3:5] / np.hypot(*bout[3:5]) * math.radians(cell.max_tilt_deg)
    turn = rotations.from_vector(
        [*across.tolist(), math.copysign(math.radians(cell.max_twist_deg), float(bout[5]))]
    )
    quaternion = np.array(rotations.multiply(cell.reference, turn)) * draw.choice([-1, 1])
    return ToolTarget(
        ToolPose(box[np.arange(3), side] + draw.choice([-1e-9, 0, 1e-9], 3), quaternion), None
    )


def _malformed(
    draw: Draw, cell: Cell, from_: ToolTarget, bout: Vector, number: int
) -> ToolTarget | None:
    position = from_.pose.position.copy()
    quaternion = from_.pose.quaternion.copy()
    width = 0.04
    odd = float(draw.choice([math.nan, math.inf, -math.inf, 1e300, -1e300, 5e-324, 1.7e308]))
    wrong: Any = draw.choice(["position", "quaternion", "width", "shape", "length", "none"])
    if wrong == "position":
        position[draw.integers(3)] = odd
    elif wrong == "quaternion":
        quaternion[draw.integers(4)] = odd
    elif wrong == "width":
        width = odd
    elif wrong == "shape":
        position = np.zeros(draw.integers(0, 9))
    elif wrong == "length":
        quaternion = quaternion * draw.choice([0, 5e-324, 1e-9, 0.5, 1.1, 1e300])
    else:
        return None
    return ToolTarget(ToolPose(position, quaternion), width)


@dataclasses.dataclass
class Trial:
    """Trajectory of one trial of N ticks."""

    commands: NDArray[np.float64]
    """Position and quaternion at each tick ``[N, 7]``."""
    joints: NDArray[np.float64]
    """Radians ``[N, 7]``."""
    fault: str | None


def run_trial(
    cell: Cell, filter_: SafetyFilter, sent: Iterator[tuple[ToolTarget | None, int]]
) -> Trial:
    """Run the filter from rest at home on ``sent`` (goal, ticks to hold it) until a fault."""
    follower = Follower(cell)
    filter_.start(follower.state())
    commands = [[*cell.home.position, *cell.home.quaternion]] * 4
    joints = [follower.joints] * 4
    fault = None
    for goal, ticks in sent:
        for _ in range(ticks):
            command, _, fault = filter_.step(goal, follower.state(), 1 / cell.servo_hz)
            follower.follow(command)
            commands.append([*command.pose.position.tolist(), *command.pose.quaternion.tolist()])
            joints.append(follower.joints)
        if fault is not None:
            break
    return Trial(np.array(commands), np.array(joints), fault)


def usage(cell: Cell, played: Trial) -> dict[str, float]:
    """Return the highest usage of each limit; 1 is the limit.

    Checks the gate's limits with separate code.
    """
    hz = cell.servo_hz
    position = played.commands[:, :3]
    quaternion = played.commands[:, 3:]
    used = {}
    for key, axis in (("workspace_x_m", 0), ("workspace_y_m", 1), ("workspace_z_m", 2)):
        low, high = getattr(cell, key)
        used[key] = float(np.abs(2 * (position[:, axis] - low) / (high - low) - 1).max())
    reference = np.broadcast_to(rotations.inverse(cell.reference), quaternion.shape)
    turn = _products(reference, quaternion)
    used["max_tilt_deg"] = (
        float(np.degrees(2 * np.arcsin(np.hypot(turn[:, 1], turn[:, 2])).max())) / cell.max_tilt_deg
    )
    used["max_twist_deg"] = (
        float(np.degrees(np.abs(_vectors(turn)[:, 2]).max())) / cell.max_twist_deg
    )
    moved = np.diff(position, axis=0)
    turned = _vectors(_products(quaternion[1:], quaternion[:-1] * [1, -1, -1, -1]))
    for steps, prefix, unit, speed in (
        (moved, "translation", "m", ""),
        (turned, "rotation", "rad", "rotation_"),
    ):
        for order, (name, power) in enumerate(
            (("speed", ""), ("acceleration", "2"), ("jerk", "3"))
        ):
            rates = np.linalg.norm(np.diff(steps, order, axis=0), axis=1) * hz ** (order + 1)
            used[f"max_{speed}{name}_{unit}_s{power}"] = float(rates.max()) / getattr(
                cell, f"max_{speed}{name}_{unit}_s{power}"
            )
        ways = np.concatenate([[0], np.cumsum(np.linalg.norm(steps, axis=1))])
        for window, ticks in (("step", cell.ticks_per_step), ("second", round(hz))):
            key = f"max_{prefix}_per_{window}_{unit}"
            used[key] = (
                float((ways[ticks:] - ways[:-ticks]).max()) / getattr(cell, key)
                if len(ways) > ticks
                else 0.0
            )
    beyond = np.maximum(played.joints - kinematics.UPPER, kinematics.LOWER - played.joints).max()
    used["joint_margin_rad"] = 1 + float(beyond) / cell.joint_margin_rad
    used["joint_acceleration"] = (
        float(np.abs(np.diff(played.joints, 2, axis=0)).max())
        * hz**2
        / kinematics.ACCELERATION_RAD_S2
    )
    return used


def _products(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Multiply quaternions ``[N, 4]``."""
    vector = a[:, :1] * b[:, 1:] + b[:, :1] * a[:, 1:] + np.cross(a[:, 1:], b[:, 1:])
    return np.concatenate(
        [a[:, :1] * b[:, :1] - (a[:, 1:] * b[:, 1:]).sum(1, keepdims=True), vector], axis=1
    )


def _vectors(q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convert quaternions ``[N, 4]`` to rotation vectors ``[N, 3]`` of at most pi."""
    q = np.where(q[:, :1] < 0, -q, q)
    sine = np.linalg.norm(q[:, 1:], axis=1, keepdims=True)
    scale: NDArray[np.float64] = np.where(
        sine > 1e-12, 2 * np.arctan2(sine, q[:, :1]) / np.maximum(sine, 1e-12), 2.0
    )
    return q[:, 1:] * scale

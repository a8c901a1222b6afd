"""The gate alone: it must refuse commands that our filter would never send."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from rlinf_vla.core import rotations
from rlinf_vla.features.realworld.robot import ToolPose, ToolTarget
from rlinf_vla.robots import cell_file
from rlinf_vla.robots.cell import Cell
from rlinf_vla.robots.command_gate import CommandGate

CELL = dataclasses.replace(
    cell_file.load(cell_file.CELLS / "franka_sim.yaml", Cell), servo_hz=100.0
)
HOME = CELL.home


def at(
    step: tuple[float, float, float] = (0, 0, 0),
    turn: tuple[float, float, float] = (0, 0, 0),
    width: float | None = None,
) -> ToolTarget:
    quaternion = rotations.multiply(rotations.from_vector(turn), HOME.quaternion.tolist())
    return ToolTarget(ToolPose(HOME.position + step, np.array(quaternion)), width)


def resting_at(target: ToolTarget) -> CommandGate:
    gate = CommandGate(CELL)
    gate.rest(target)
    return gate


def test_a_resting_command_passes() -> None:
    gate = resting_at(at())
    assert all(gate.check(at()) is None for _ in range(300))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (at((math.nan, 0, 0)), "not a valid pose"),
        (at((0, math.inf, 0)), "not a valid pose"),
        (ToolTarget(ToolPose(HOME.position, HOME.quaternion * 1.001)), "not a valid pose"),
        (ToolTarget(ToolPose(HOME.position, np.full(4, math.nan))), "not a valid pose"),
        (at((0.4, 0, 0)), "workspace_x_m"),
        (at((0, -0.31, 0)), "workspace_y_m"),
        (at((0, 0, 0.1)), "workspace_z_m"),
        (at(turn=(math.radians(30.1), 0, 0)), "max_tilt_deg"),
        (at(turn=(0, 0, math.radians(100.1))), "max_twist_deg"),
        (at(width=0.081), "gripper_width_m"),
        (at(width=math.nan), "gripper_width_m"),
        (at((0.00251, 0, 0)), "max_speed_m_s"),
        (at((0, 0.0005, 0)), "max_acceleration_m_s2"),
        (at((0, 0, -0.0003)), "max_jerk_m_s3"),
        (at(turn=(0, 0, 0.013)), "max_rotation_speed_rad_s"),
        (at(turn=(0, 0.002, 0)), "max_rotation_acceleration_rad_s2"),
        (at(turn=(0.0013, 0, 0)), "max_rotation_jerk_rad_s3"),
    ],
)
def test_each_limit_is_enforced_and_named(command: ToolTarget, said: str) -> None:
    gate = resting_at(at())
    problem = gate.check(command)
    assert problem is not None and problem.startswith((said, f"the command is {said}"))
    assert gate.check(at()) is None, "a refused command is not remembered"


@pytest.mark.parametrize(
    ("direction", "key"),
    [
        ((0.0, 1.0, 0.0), "max_translation_per_second_m"),
        ((0.0, 0.0, 1.0), "max_rotation_per_second_rad"),
    ],
)
def test_the_path_length_per_second_is_limited(direction: rotations.Triple, key: str) -> None:
    """Accelerates within acceleration and jerk, then keeps its speed."""
    rotation = "rotation" in key
    gate = resting_at(at())
    speed = 0.0
    gone = 0.0
    problem = None
    most = CELL.max_rotation_speed_rad_s if rotation else CELL.max_speed_m_s
    for tick in range(200):
        speed = most * min(1.0, (1 - math.cos(math.pi * min(tick / 40, 1))) / 2)
        gone += 0.999 * speed / CELL.servo_hz
        moved = (gone * direction[0], gone * direction[1], gone * direction[2])
        problem = gate.check(at(turn=moved) if rotation else at(moved))
        if problem is not None:
            break
    assert problem is not None and problem.startswith(key)


def test_the_path_length_per_step_is_limited() -> None:
    gate = CommandGate(dataclasses.replace(CELL, max_translation_per_step_m=0.02))
    problems = []
    gate.rest(at())
    for tick in range(60):  # up to 0.23 m/s
        way = (
            0.0023 / 2 * (tick - 40 / math.pi * math.sin(math.pi * tick / 40))
            if tick <= 40
            else 0.0023 * (tick - 20)
        )
        problems.append(gate.check(at((0, way, 0))))
    assert next(each for each in problems if each).startswith("max_translation_per_step_m")

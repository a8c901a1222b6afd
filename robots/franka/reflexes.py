"""Thresholds of the arm's own collision reflexes; free of franky."""

from __future__ import annotations

import math

from .. import kinematics
from ..cell import Cell

MARGIN = 1.5
"""Factor of the reflex thresholds over our force limits, whose stop is the gentler one."""
_LEAST_N_M = (20.0, 20.0, 18.0, 18.0, 16.0, 14.0, 12.0)
"""Franka's defaults (libfranka's examples): below them, motion without contact may be a reflex."""
_SHARE = 0.8
"""Largest threshold as a share of what the joint's motor can hold: more could never be felt."""


def joint_thresholds(cell: Cell) -> list[float]:
    """Return the external torque at which each joint's reflex stops the arm, N m ``[7]``.

    It is the torque of MARGIN times ``max_force_n`` at the tool with the longest lever, between
    Franka's default and _SHARE of the joint's largest torque. The latter has priority: at the wrist
    it is below the default, and can be reached before ``max_torque_n_m``.
    """
    tool = math.hypot(*cell.tool_position_m)
    torques = (MARGIN * cell.max_force_n * lever for lever in kinematics.levers(tool))
    return [
        min(max(torque, least), _SHARE * most)
        for torque, least, most in zip(torques, _LEAST_N_M, kinematics.TORQUE_N_M, strict=True)
    ]


def tool_thresholds(cell: Cell) -> list[float]:
    """Return the same for the tool: N ``[3]`` and N m ``[3]``."""
    return [MARGIN * cell.max_force_n] * 3 + [MARGIN * cell.max_torque_n_m] * 3

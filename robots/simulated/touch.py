"""Touch the cube: the simulated cell lays it out, and its truth says when it is touched."""

from __future__ import annotations

import numpy as np

from rlinf_vla.robot import Action, RobotSpec, RobotState, Vector

from .client import SimulatedCell
from .scene import CUBE_M

X_M, Y_M = (0.42, 0.60), (-0.18, 0.18)
"""Where the cube may lie."""
TARGET = (0.62, 0.28)
"""Where the disc lies, which this task does not need."""
NEAR_M = 0.03
"""Of the tool centre point and the middle of the cube's upper face."""
GAIN = 1.0
"""The expert's: it goes all the way that is left, as far as an action reaches."""


class Touch:
    task, by_hand, has_expert = "TouchCube", False, True

    def __init__(self, cell: SimulatedCell, spec: RobotSpec, dimensions: int = 4) -> None:
        """``dimensions``: of the expert's actions, 4 or 7."""
        self._cell, self._spec, self._dimensions = cell, spec, dimensions

    def arrange(self, seed: int) -> str:
        draw = np.random.default_rng(seed).uniform
        self._cell.place((float(draw(*X_M)), float(draw(*Y_M)), float(draw(-np.pi, np.pi))), TARGET)
        return "touch the red cube"

    def succeeded(self, state: RobotState) -> bool | None:
        return float(np.linalg.norm(self._way(state))) < NEAR_M

    def expert(self, state: RobotState) -> Action | None:
        action = np.zeros(self._dimensions, np.float32)
        way = GAIN * self._way(state) / self._spec.translation_m
        action[:3] = way / max(1.0, float(np.linalg.norm(way)))
        action[-1] = 1.0
        return action

    def _way(self, state: RobotState) -> Vector:
        """From the tool to the cube, metres ``[3]``."""
        way: Vector = self._cell.truth().cube + np.array([0.0, 0.0, CUBE_M / 2]) - state.pose.position
        return way

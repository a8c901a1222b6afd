"""Task in the simulated cell: touch the cube. The simulation's true state gives success."""

from __future__ import annotations

import numpy as np

from rlinf_vla.core.action_space import ToolSpace
from rlinf_vla.core.robot import Action, RobotState, ToolState, Vector

from .client import SimulatedCell
from .scene import CUBE_M

X_M, Y_M = (0.42, 0.60), (-0.18, 0.18)
"""Range of the cube's position."""
TARGET = (0.62, 0.28)
"""Position of the disc, which this task does not use."""
NEAR_M = 0.03
"""Success distance between the tool centre point and the centre of the cube's upper face."""
GAIN = 1.0
"""Fraction of the remaining distance that the expert moves, as far as an action reaches."""


class Touch:
    """Implements ``Scene``."""

    task, by_hand, has_expert = "TouchCube", False, True
    instructions: tuple[str, ...] = ("touch the red cube",)

    def __init__(self, cell: SimulatedCell, space: ToolSpace) -> None:
        self._cell, self._space = cell, space

    def arrange(self, seed: int) -> str:
        draw = np.random.default_rng(seed).uniform
        self._cell.place((float(draw(*X_M)), float(draw(*Y_M)), float(draw(-np.pi, np.pi))), TARGET)
        return self.instructions[0]

    def succeeded(self, state: RobotState) -> bool | None:
        return float(np.linalg.norm(self._way(state))) < NEAR_M

    def expert(self, state: RobotState) -> Action | None:
        way = GAIN * self._way(state) / self._space.translation_m
        return np.array([*(way / max(1.0, float(np.linalg.norm(way)))), 1.0], np.float32)

    def _way(self, state: RobotState) -> Vector:
        """Return the vector from the tool to the top of the cube, metres ``[3]``."""
        assert isinstance(state, ToolState)
        way: Vector = self._cell.truth().cube + np.array([0.0, 0.0, CUBE_M / 2]) - state.pose.position
        return way

"""Tasks in the simulated cell: touch the cube. The simulation's true state gives success."""

from __future__ import annotations

import numpy as np

from rlinf_vla.features.realworld.action_space import ToolSpace
from rlinf_vla.features.realworld.robot import Action, RobotState, ToolState, Vector

from .client import SimulatedCell
from .scene import CUBE_M

X_M = (0.42, 0.60)
Y_M = (-0.18, 0.18)
"""Range of the cube's position."""
TARGET = (0.62, 0.28)
"""Position of the disc, which the first task does not use."""
NEAR_M = 0.03
"""Success distance between the tool centre point and the centre of the cube's upper face."""
GAIN = 1.0
"""Fraction of the remaining distance that the expert moves, as far as an action reaches."""


class Touch:
    """Implements ``Scene``."""

    task = "TouchCube"
    by_hand = False
    has_expert = True
    instructions: tuple[str, ...] = ("touch the red cube",)

    def __init__(self, cell: SimulatedCell, space: ToolSpace) -> None:
        self._cell = cell
        self._space = space

    def arrange(self, seed: int) -> str:
        draw = np.random.default_rng(seed).uniform
        self._cell.place((float(draw(*X_M)), float(draw(*Y_M)), float(draw(-np.pi, np.pi))), TARGET)
        return self.instructions[0]

    def succeeded(self, state: RobotState) -> bool | None:
        return float(np.linalg.norm(self._way(state))) < NEAR_M

    def expert(self, state: RobotState) -> Action | None:
        return self._towards(self._way(state))

    def _towards(self, way: Vector) -> Action:
        way = GAIN * way / self._space.translation_m
        return np.array([*(way / max(1.0, float(np.linalg.norm(way)))), 1.0], np.float32)

    def _way(self, state: RobotState) -> Vector:
        """Return the vector from the tool to the top of the cube, metres ``[3]``."""
        way: Vector = self._cell.truth().cube + np.array([0.0, 0.0, CUBE_M / 2]) - self._tool(state)
        return way

    def _tool(self, state: RobotState) -> Vector:
        assert isinstance(state, ToolState)
        return state.pose.position


HOME_M = (0.307, 0.0)
"""Horizontal position of the tool at home."""
FAR_X_M = (0.54, 0.60)
FAR_Y_M = (-0.1, 0.1)
"""Range of the cube's position behind the disc."""
COLUMN_M = 0.045
"""Radius of the column over the disc that the tool must not enter."""
DETOUR_M = 0.1
"""Distance from the disc at which the expert passes."""


class TouchAround(Touch):
    """Implements ``Scene``: the disc lies half-way, and the tool must not pass over it.

    The expert passes on the left or on the right, as the seed says. So demonstrations have two
    modes, and a policy that changes its mind on the way loses time or passes over the disc.
    """

    task = "TouchAround"
    instructions = ("go around the green disc and touch the red cube",)

    def arrange(self, seed: int) -> str:
        rng = np.random.default_rng(seed)
        cube = np.array([rng.uniform(*FAR_X_M), rng.uniform(*FAR_Y_M)])
        self._disc = (HOME_M + cube) / 2
        ahead = (cube - HOME_M) / np.linalg.norm(cube - HOME_M)
        self._side = float(rng.choice([-1.0, 1.0])) * np.array([-ahead[1], ahead[0]])
        self._ahead = ahead
        self._entered = False
        self._cell.place(
            (*cube.tolist(), float(rng.uniform(-np.pi, np.pi))), tuple(self._disc.tolist())
        )
        return self.instructions[0]

    def succeeded(self, state: RobotState) -> bool | None:
        """False for the rest of the episode once the tool was over the disc."""
        self._entered |= float(np.linalg.norm(self._tool(state)[:2] - self._disc)) < COLUMN_M
        return not self._entered and super().succeeded(state)

    def expert(self, state: RobotState) -> Action | None:
        tool, way = self._tool(state), self._way(state)
        before = float(
            (self._disc - tool[:2]) @ self._ahead
        )  # horizontally, of the line on which the expert passes the disc
        if before <= self._space.translation_m / 2:
            return self._towards(way)
        abeam = self._disc + DETOUR_M * self._side - tool[:2]
        share = before / float(way[:2] @ self._ahead)
        return self._towards(np.array([*abeam, share * way[2]]))


TASKS: dict[str, type[Touch]] = {kind.task: kind for kind in (Touch, TouchAround)}
